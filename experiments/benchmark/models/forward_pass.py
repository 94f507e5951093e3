"""Parameters of drawn models."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray


def draw(model: nn.Module, *inputs: Any) -> Any:
    """Draw untrained parameters in bf16, as frozen models hold them; a program widens them itself."""

    def initial(key: PRNGKeyArray) -> Any:
        params = nn.meta.unbox(model.init(key, *inputs)["params"])
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    return jax.jit(initial)(jax.random.key(0))
