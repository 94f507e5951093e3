"""Parameters without a program that draws them: it would take 0.09 s of CPU a parameter to compile."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np


def drawn(module: nn.Module, *inputs: Any, boxed: bool = False, seed: int = 0, **options: Any) -> Any:
    """Draw variables of the shapes that `module.init` returns: vectors about 1, matrices that keep an input's size.

    Args:
      boxed: keep the names of the parameters' axes.
    """
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs, **options)
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        z = rng.standard_normal(leaf.shape)
        numbers = z / leaf.shape[-2] ** 0.5 if len(leaf.shape) > 1 else 1 + 0.3 * z
        # Cast on the host and put on the device: jnp.asarray compiles a program for each shape
        return jax.device_put(numbers.astype(leaf.dtype))

    return jax.tree.map(draw, shapes if boxed else nn.meta.unbox(shapes))


def abstract_like(state: Any) -> Any:
    """Return shapes, dtypes and shardings of `state`'s arrays, as `checkpoint.restore` wants them."""

    def describe(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))

    return jax.tree.map(describe, state)
