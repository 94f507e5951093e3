"""Parameters of drawn models: parts that the benchmarks of whole models share."""

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


def narrow_kernels(params: Any) -> Any:
    """Return parameters with kernels in bf16, as runs hold a frozen base."""

    def narrow(path: Any, leaf: Any) -> Any:
        return leaf.astype(jnp.bfloat16) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(narrow, params)


def kernel_sizes(params: Any) -> int:
    """Count the entries of all matrices that a token is multiplied with; tables, norms and filters do not count."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(leaf.size for path, leaf in leaves if _is_kernel(jax.tree_util.keystr(path[-1:])))


def _is_kernel(name: str) -> bool:
    return name in ("['kernel']", "['in']", "['out']")
