"""Compression of an interval: tokens pooled to a few candidates by latent queries, and a probe of what that loses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.cells.experimental.addressing import exact_product
from pallas_kernels.neural_memory import multiply

DEPENDENT = 1e-3
"""A candidate whose part outside of those before it is shorter than this share of its length adds no direction."""


def count_latents(ratio: float, interval: int) -> tuple[int, ...]:
    """Return ceil(ratio n) for n = 0 ... interval tokens."""
    # Round first: 0.55 * 20 is 11.000000000000002 in floating point, and is to give 11.
    return tuple(math.ceil(round(ratio * n, 9)) for n in range(interval + 1))


def compress(
    latents: Float[Array, "H L M"],
    places: Float[Array, "H L C"],
    k: Float[Array, "B H N M"],
    u: Float[Array, "B H N M"],
    content: Bool[Array, "B N"],
    dtype: Any,
) -> Float[Array, "B H L M"]:
    """Return candidates s_l = sum_t p_lt u_t in fp32.

    p_l = softmax_t(latent_l . k_t / sqrt(M) + place_lt).

    Args:
      latents: learned queries.
      places: learned bias of a latent for the interval's t-th place.
      k, u: keys and gated contents of the interval's N <= C tokens.
      content: False for holes, which no latent sees.
      dtype: of the products' operands.
    """
    scores = multiply("hlm,bhnm->bhln", latents, k, dtype) / math.sqrt(k.shape[-1])
    scores = scores + places[None, :, :, : k.shape[2]]
    seen = content[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), -1)
    return multiply("bhln,bhnm->bhlm", jnp.where(seen, p, 0), u, dtype)


def reconstruction_error(
    candidates: Float[Array, "B H L M"], u: Float[Array, "B H N M"], content: Bool[Array, "B N"]
) -> Float[Array, "B H L"]:
    """Return the energy share that the first l candidates cannot give back, for l = 1 ... L.

    |U - U P_l|^2 / |U|^2, where P_l projects to the span of the first l candidates: what the best linear decoder would
    leave. It falls with l, and is 0 where l candidates span all tokens. Without gradients.

    Args:
      candidates: s_1 ... s_L, as `compress` makes them.
      u: gated contents U of the interval's N tokens.
      content: False for holes, which do not count.

    Raises:
      ValueError: the arrays do not fit.
    """
    _check_fits(candidates, u, content)
    candidates, u = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in (candidates, u))
    u = jnp.where(content[:, None, :, None], u, 0)

    def add(basis: Float[Array, "L B H M"], item: tuple[Array, Array]) -> tuple[Array, Array]:
        number, s = item
        rest = s
        for _ in range(2):  # Repeat: rounding leaves a share of the basis in a rest that is short.
            rest = rest - exact_product("lbh,lbhm->bhm", exact_product("lbhm,bhm->lbh", basis, rest), basis)
        length, whole = (jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (rest, s))
        new = length > DEPENDENT * whole
        direction = jnp.where(new, rest / jnp.where(new, length, 1), 0)
        caught = jnp.sum(jnp.square(exact_product("bhnm,bhm->bhn", u, direction)), -1)
        here = jnp.arange(len(basis)) == number
        return jnp.where(here[:, None, None, None], direction, basis), caught

    ordered = jnp.moveaxis(candidates, 2, 0)
    numbers = jnp.arange(len(ordered), dtype=jnp.int32)
    _, caught = jax.lax.scan(add, jnp.zeros_like(ordered), (numbers, ordered))
    energy = jnp.sum(u * u, (-2, -1))
    lost = 1 - jnp.cumsum(caught, 0) / jnp.where(energy > 0, energy, 1)[None]
    return jnp.moveaxis(jnp.where(energy[None] > 0, jnp.maximum(lost, 0), 0), 0, -1)


def _check_fits(candidates: Any, u: Any, content: Any) -> None:
    """Raise ValueError unless the arrays are of the same rows, heads, tokens and width."""
    s, tokens, seen = (getattr(x, "shape", ()) for x in (candidates, u, content))
    rows, heads, length, width = tokens if len(tokens) == 4 else (None,) * 4
    if len(s) != 4 or (*s[:2], s[3], *seen) != (rows, heads, width, rows, length):
        found = ", ".join(str(getattr(x, "shape", type(x).__name__)) for x in (candidates, u, content))
        raise ValueError(
            "reconstruction_error takes candidates [B, H, L, M], u [B, H, N, M] and content [B, N], the arrays of "
            f"`compress`, got {found}"
        )


def kept_latents(
    error: Float[Array, "B H L"] | None, counts: Int[Array, "B"], latents: int, tolerance: float | None
) -> Int[Array, "B #H"]:
    """Return how many candidates to write: the fewest within the tolerance, at most `counts`."""
    if error is None or tolerance is None:
        return jnp.minimum(counts, latents)[:, None]
    enough = 1 + jnp.sum(error > tolerance, -1, dtype=jnp.int32)
    return jnp.minimum(enough, counts[:, None])
