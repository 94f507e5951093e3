"""Gathers forward; backward n-grams sorted by row: equal rows are neighbours in one scatter-add that knows it."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._own_gradient import OwnGradient


def hash_embedding(
    table: Float[Array, "N D"], rows: Int[Array, "*S G"], *, dtype: Any = None
) -> Float[Array, "*S D"]:
    """Compute `hash_embedding` by XLA."""
    dtype = jnp.dtype(dtype or table.dtype)
    table, flat = vary_alike(table, rows.reshape(-1, rows.shape[-1]))
    total = _sum_of_rows((table.shape[0], table.dtype, dtype), table, flat)
    return total.reshape(*rows.shape[:-1], table.shape[1])


def _forward(
    kinds: tuple[int, Any, Any], table: Float[Array, "N D"], rows: Int[Array, "M G"]
) -> tuple[Float[Array, "M D"], Int[Array, "M G"]]:
    tables = rows.shape[1]
    size = kinds[0] // tables
    taken = [jnp.take(table, rows[:, g] + g * size, axis=0, mode="clip") for g in range(tables)]
    wide = [x.astype(jnp.float32) for x in taken]
    return sum(wide[1:], wide[0]).astype(kinds[2]), rows


def _backward(
    kinds: tuple[int, Any, Any], rows: Int[Array, "M G"], dy: Float[Array, "M D"]
) -> tuple[Float[Array, "N D"], None]:
    count, dtype, _ = kinds
    row, token = _sort(rows, count)
    updates = jnp.take(dy, token, axis=0, mode="clip").astype(jnp.float32)
    start, updates, row = vary_alike(jnp.zeros((count, dy.shape[1]), jnp.float32), updates, row)
    return start.at[row].add(updates, mode="drop", indices_are_sorted=True).astype(dtype), None


_sum_of_rows = OwnGradient(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_sum_of_rows.defvjp(_forward, _backward)


def _sort(rows: Int[Array, "M G"], count: int) -> tuple[Int[Array, "K"], Int[Array, "K"]]:
    """Return the row among all tables, and the token, of every n-gram, in the order of rows."""
    tokens, tables = rows.shape
    offsets = jnp.arange(tables, dtype=rows.dtype)[None] * (count // tables)
    token = lax.broadcasted_iota(jnp.int32, (tokens, tables), 0)
    pairs = vary_alike((rows + offsets).reshape(-1), token.reshape(-1))
    row, token = lax.sort(pairs, num_keys=1, is_stable=False)
    return row, token
