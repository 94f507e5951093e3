"""The public function and its implementation table."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.hash_embedding.reference import hash_embedding as by_matmul
from pallas_kernels.hash_embedding.xla import hash_embedding as by_gather

TABLE = (Implementation("xla", by_gather), Implementation("reference", by_matmul))
"""Implementations of the operation, fastest first."""


@checked
def hash_embedding(
    table: Float[Array, "N D"],
    rows: Int[Array, "*S G"],
    *,
    dtype: Any = None,
    implementation: Literal["xla", "reference"] | None = None,
) -> Float[Array, "*S D"]:
    """Return y = sum_g table_g[rows_g], summed in fp32; so is the gradient of the tables.

    Args:
      table: G tables of N / G rows each, one after the other.
      rows: a row of each table (from `ngram_rows`), in 0..N/G - 1.
      dtype: of the result; the table's if None.
      implementation: a name of the table of implementations; None takes the first that runs here.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that is unknown.

    Source: Byte Latent Transformer (2412.09871), sec. 3.2.1.
    """
    if table.ndim != 2 or rows.ndim < 2 or table.shape[0] % rows.shape[-1]:
        raise ValueError(
            "hash_embedding: expected table [N, D] and rows [..., G] with N a multiple of the number of tables G, "
            f"got {table.shape} and {rows.shape}"
        )
    if not jnp.issubdtype(table.dtype, jnp.floating) or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(
            f"hash_embedding: expected a table of floats and rows of integers, got {table.dtype} and {rows.dtype}"
        )
    tables = Range(0, table.shape[0] // rows.shape[-1] - 1, "take rows of `ngram_rows`")
    check_values("hash_embedding", {"rows": tables}, {"rows": rows})
    entry = choose("hash_embedding", TABLE, implementation, current_device(), table, rows, dtype=dtype)
    return entry.run(table, rows, dtype=dtype)


def explain(table: Any, rows: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(hash_embedding, device, table, rows, **options)
