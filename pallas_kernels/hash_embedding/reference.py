"""The definition: a matmul with the one-hot rows of each table, in fp32."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def hash_embedding(
    table: Float[Array, "N D"], rows: Int[Array, "*S G"], *, dtype: Any = None
) -> Float[Array, "*S D"]:
    """Compute `hash_embedding` by its definition."""
    tables = table.astype(jnp.float32).reshape(rows.shape[-1], -1, table.shape[1])
    chosen = jax.nn.one_hot(rows, tables.shape[1], dtype=jnp.float32)
    total = jnp.einsum("...gr,grd->...d", chosen, tables, precision="highest")
    return total.astype(dtype or table.dtype)
