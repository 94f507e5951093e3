"""The definition, in fp32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Matrices = tuple[Float[Array, "_ _"], ...]


def code_of_ranks(
    code: Float[Array, "B C E"] | None, chunk: int, length: int, rank: int
) -> Float[Array, "B T R"] | None:
    """The number of every token's every rank: a chunk's tokens share a code, and the ranks of a block a number."""
    if code is None:
        return None
    tokens = jnp.repeat(code, chunk, axis=1)[:, :length] if chunk > 1 else code
    return jnp.repeat(tokens, rank // code.shape[-1], axis=-1)


def routed_lora_reference(
    x: Float[Array, "B T K"],
    w: Matrices,
    v: Matrices,
    u: Matrices,
    code: Float[Array, "B C E"] | None,
    *,
    chunk: int,
    scale: float,
) -> tuple[Float[Array, "B T _"], ...]:
    """See `routed_lora`; it has derivatives of any order."""
    found = []
    for weight, down, up in zip(w, v, u, strict=True):
        wide, kernel, down, up = (a.astype(jnp.float32) for a in (x, weight, down, up))
        z = jnp.matmul(wide, down, precision=lax.Precision.HIGHEST) * jnp.float32(scale)
        numbers = code_of_ranks(code, chunk, x.shape[1], down.shape[1])
        z = z if numbers is None else z * numbers.astype(jnp.float32)
        y = jnp.matmul(wide, kernel, precision=lax.Precision.HIGHEST)
        found.append((y + jnp.matmul(z, up, precision=lax.Precision.HIGHEST)).astype(x.dtype))
    return tuple(found)
