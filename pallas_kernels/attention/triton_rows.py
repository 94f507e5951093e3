"""The rule of `vmap` that the Triton kernels share: more rows of the batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def over_more_rows(run: Any) -> Any:
    """Return the rule of `vmap`: the new axis joins the batch."""

    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        def join(x: Array, is_batched: bool) -> Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        found = run(*jax.tree.map(join, args, tuple(batched)))
        return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), found), (True,) * len(found)

    return rule
