"""Parts of the Triton kernels: rows of one head in and out of memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int


def head_and_tile(heads: int) -> tuple[Array, Array]:
    """Return head and tile of this program.

    The heads of a tile are neighbours, so that they read whole rows together.
    """
    program = pl.program_id(0)
    return lax.rem(program, heads), lax.div(program, heads)


def read(
    ref: Any, start: Any, keep: Bool[Array, "rows"], other: float = 0
) -> Int[Array, "rows"] | Bool[Array, "rows"] | Float[Array, "rows"]:
    """Read numbers from `start` on; `other` where they are not kept."""
    return pltriton.load(ref.at[pl.ds(start, len(keep))], mask=keep, other=jnp.asarray(other, ref.dtype))


def read_rows(ref: Any, start: Any, head: Array, keep: Bool[Array, "rows"]) -> Float[Array, "rows K"]:
    """Read a head of the rows from `start` on; what is not kept is not read and 0."""
    return pltriton.load(ref.at[pl.ds(start, len(keep)), head, :], mask=keep[:, None], other=0)


def write_rows(
    ref: Any, start: Any, head: Array, keep: Bool[Array, "rows"], x: Float[Array, "rows K"]
) -> None:
    """Write what `read_rows` reads."""
    pltriton.store(ref.at[pl.ds(start, len(keep)), head, :], x.astype(ref.dtype), mask=keep[:, None])


def scale(ref: Any) -> float:
    """Return 1 / sqrt(K)."""
    return ref.shape[-1] ** -0.5


def like(x: Array) -> Any:
    """Return the type of a result like x, inside `shard_map` as well."""
    return jax.typeof(x)
