"""Small layers every block is built of: norm, dense, MLP, with logical axis names on their parameters."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.mixers.base import named


def dense(features: int, *, axes: tuple[str, str], dtype: Any, name: str, scale: float = 1.0) -> nn.Dense:
    """A dense layer without bias; LeCun-normal kernel times `scale`."""
    init = nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal")
    return nn.Dense(features, use_bias=False, dtype=dtype, kernel_init=named(init, *axes), name=name)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * scale, computed in fp32, returned in `dtype` (Zhang and Sennrich, 1910.07467)."""

    dtype: Any = jnp.float32
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        scale = self.param("scale", named(nn.initializers.ones, "norm"), (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        return (wide * inverse * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(self.dtype)


class MLP(nn.Module):
    """SwiGLU: (silu(x W_g) * x W_u) W_d (Shazeer, 2002.05202).

    Attributes:
      hidden: width of the hidden layer.
      dtype: compute dtype.
      out_scale: scale of the output kernel's initial standard deviation.
    """

    hidden: int
    dtype: Any = jnp.float32
    out_scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = dense(self.hidden, axes=("embed", "mlp"), dtype=self.dtype, name="gate")(x)
        up = dense(self.hidden, axes=("embed", "mlp"), dtype=self.dtype, name="up")(x)
        down = dense(x.shape[-1], axes=("mlp", "embed"), dtype=self.dtype, name="down", scale=self.out_scale)
        return down(jax.nn.silu(gate) * up)
