"""Gathers forward; backward one of several ways to add every byte's gradient to the rows it read.

JAX's own gradient is one scatter-add over all n-grams of all tables. The others, `GRADIENTS`:

- "by_table": a scatter-add for each table, so that what is added to is small and every table shares the updates.
- "sorted": n-grams sorted by row first, so that equal rows are neighbours in one scatter-add that knows it.
- "blocks": sorted, then neighbours of one row are summed inside blocks of `BLOCK` by a matmul with a one-hot matrix, so
  that the scatter-add has one update a row and block.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike

BLOCK = 128
"""Sorted n-grams that are summed at a time."""

Gradient = Literal["by_table", "sorted", "blocks"]


def hash_embedding(
    table: Float[Array, "N D"], rows: Int[Array, "*S G"], *, dtype: Any = None, gradient: Gradient = "sorted"
) -> Float[Array, "*S D"]:
    """See `pallas_kernels.hash_embedding.hash_embedding`; `gradient` says how the backward pass adds."""
    dtype = jnp.dtype(dtype or table.dtype)
    table, flat = vary_alike(table, rows.reshape(-1, rows.shape[-1]))
    total = _sum_of_rows(gradient, (table.shape[0], table.dtype, dtype), table, flat)
    return total.reshape(*rows.shape[:-1], table.shape[1])


def _forward(
    gradient: Gradient, kinds: tuple[int, Any, Any], table: Float[Array, "N D"], rows: Int[Array, "M G"]
) -> tuple[Float[Array, "M D"], Int[Array, "M G"]]:
    del gradient
    tables = rows.shape[1]
    size = kinds[0] // tables
    taken = [jnp.take(table, rows[:, g] + g * size, axis=0, mode="clip") for g in range(tables)]
    return sum((x.astype(jnp.float32) for x in taken[1:]), taken[0].astype(jnp.float32)).astype(
        kinds[2]
    ), rows


def _backward(
    gradient: Gradient, kinds: tuple[int, Any, Any], rows: Int[Array, "M G"], dy: Float[Array, "M D"]
) -> tuple[Float[Array, "N D"], None]:
    return GRADIENTS[gradient](dy, rows, kinds[0]).astype(kinds[1]), None


_sum_of_rows = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0, 1))
_sum_of_rows.defvjp(_forward, _backward)


def _by_table(dy: Float[Array, "M D"], rows: Int[Array, "M G"], count: int) -> Float[Array, "N D"]:
    tables = rows.shape[1]
    parts = [_add(dy, rows[:, g], count // tables) for g in range(tables)]
    return jnp.concatenate(parts)


def _sorted(dy: Float[Array, "M D"], rows: Int[Array, "M G"], count: int) -> Float[Array, "N D"]:
    row, token = _sort(rows, count)
    return _add(jnp.take(dy, token, axis=0, mode="clip"), row, count, indices_are_sorted=True)


def _blocks(dy: Float[Array, "M D"], rows: Int[Array, "M G"], count: int) -> Float[Array, "N D"]:
    row, token = _sort(rows, count)
    missing = -row.shape[0] % BLOCK
    row = jnp.pad(row, (0, missing), constant_values=count).reshape(-1, BLOCK)
    token = jnp.pad(token, (0, missing)).reshape(-1, BLOCK)
    rank = jnp.cumsum(row != jnp.pad(row[:, :-1], ((0, 0), (1, 0)), mode="edge"), 1, dtype=jnp.int32)
    member = rank[:, None, :] == jnp.arange(BLOCK, dtype=jnp.int32)[None, :, None]
    target = jnp.min(jnp.where(member, row[:, None, :], count), -1)
    updates = jnp.take(dy, token, axis=0, mode="clip")
    sums = jnp.einsum("nrk,nkd->nrd", member.astype(dy.dtype), updates, preferred_element_type=jnp.float32)
    return _add(sums.reshape(-1, dy.shape[1]), target.reshape(-1), count)


GRADIENTS: dict[Gradient, Callable[..., Array]] = {
    "by_table": _by_table,
    "sorted": _sorted,
    "blocks": _blocks,
}


def _sort(rows: Int[Array, "M G"], count: int) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """The row among all tables, and the token, of every n-gram, in the order of rows."""
    tokens, tables = rows.shape
    offsets = jnp.arange(tables, dtype=rows.dtype)[None] * (count // tables)
    token = lax.broadcasted_iota(jnp.int32, (tokens, tables), 0)
    pairs = vary_alike((rows + offsets).reshape(-1), token.reshape(-1))
    row, token = lax.sort(pairs, num_keys=1, is_stable=False)
    return row, token


def _add(
    updates: Float[Array, "K D"], row: Int[Array, "K"], count: int, **promises: bool
) -> Float[Array, "N D"]:
    """Updates summed in fp32 into `count` rows; a row of `count` or more is dropped."""
    start, updates, row = vary_alike(jnp.zeros((count, updates.shape[1]), jnp.float32), updates, row)
    return start.at[row].add(updates.astype(jnp.float32), mode="drop", **promises)
