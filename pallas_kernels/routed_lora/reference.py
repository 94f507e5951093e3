"""The definition, in fp32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.routed_lora.active import code_of_tokens, masked

Matrices = tuple[Float[Array, "_ _"], ...]


def code_of_ranks(code: Float[Array, "B C E"], chunk: int, length: int, rank: int) -> Float[Array, "B T R"]:
    """Return the number of every token's every rank.

    A chunk's tokens share a code, and the ranks of a block a number.
    """
    return jnp.repeat(code_of_tokens(code, chunk, length), rank // code.shape[-1], axis=-1)


def routed_lora_reference(
    x: Float[Array, "B T K"],
    w: Matrices | None,
    v: Matrices,
    u: Matrices,
    code: Float[Array, "B C E"] | None,
    *,
    chunk: int,
    scale: float,
    active: Bool[Array, "tiles E"] | None = None,
    channels_first: bool = False,
) -> tuple[Float[Array, "B _ _"], ...]:
    """Compute `routed_lora` by its definition; it has derivatives of any order."""
    if code is not None and active is not None:
        code, chunk = masked(code, active, chunk, x.shape[1]), 1
    found, wide = [], x.astype(jnp.float32)
    for i, (down, up) in enumerate(zip(v, u, strict=True)):
        z = _matmul(wide, down) * jnp.float32(scale)
        if code is not None:
            z = z * code_of_ranks(code, chunk, x.shape[1], down.shape[1]).astype(jnp.float32)
        y = _matmul(z, up)
        y = (y if w is None else y + _matmul(wide, w[i])).astype(x.dtype)
        found.append(y.swapaxes(1, 2) if channels_first else y)
    return tuple(found)


def _matmul(a: Float[Array, "B T K"], b: Float[Array, "K N"]) -> Float[Array, "B T N"]:
    return jnp.matmul(a, b.astype(jnp.float32), precision=lax.Precision.HIGHEST)
