"""Sums of hashed n-grams against JAX's own gather and scatter-add: `python -m pallas_kernels.hash_embedding.bench`.

Rows that many bytes share are what makes them differ, so the bytes are a text: random words with Zipf's frequencies.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.hash_embedding.hashes import ngram_rows
from pallas_kernels.hash_embedding.shapes import SHAPES, HashShape
from pallas_kernels.hash_embedding.xla import hash_embedding


def plan(shape: HashShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Plan the op against `jnp.take` and its gradient.

    The table is in fp32, results are in `dtype`.
    """
    tables = len(shape.sizes)
    table = jax.random.normal(jax.random.key(1), (tables * shape.table_size, shape.dim)) * 0.02
    ids = jnp.asarray(zipf_text(shape.batch, shape.length))
    history = jnp.zeros((shape.batch, max(shape.sizes) - 1), jnp.uint32)
    rows = ngram_rows(ids, history, None, sizes=shape.sizes, table_size=shape.table_size)
    touched = np.unique(np.asarray(rows) + np.arange(tables) * shape.table_size).size
    args = (table, rows)
    read = touched * shape.dim * table.itemsize + rows.nbytes
    result = shape.batch * shape.length * shape.dim * jnp.dtype(dtype).itemsize
    return Plan(
        truth=Case("truth", lambda table, rows: _plain(table, rows, jnp.float32).astype(dtype), args),
        plain=Case("plain", partial(_plain, dtype=dtype), args),
        versions=[Case("xla", partial(hash_embedding, dtype=dtype), args)],
        work={
            "forward": Work(0.0, read + result),
            "forward+backward": Work(0.0, read + 2 * result + rows.nbytes + table.nbytes),
        },
    )


def zipf_text(rows: int, length: int, *, words: int = 10_000) -> np.ndarray:
    """Draw byte ids [rows, length] of words of 1 to 10 random letters.

    The k-th most frequent word has weight 1 / k.
    """
    rng = np.random.default_rng(0)
    letters = [rng.integers(ord("a"), ord("z") + 1, rng.integers(1, 11)) for _ in range(words)]
    spaced = [np.append(word, ord(" ")).astype(np.int32) + 4 for word in letters]
    weights = 1 / np.arange(1, words + 1)
    drawn = rng.choice(words, rows * length // 2, p=weights / weights.sum())
    return np.concatenate([spaced[i] for i in drawn])[: rows * length].reshape(rows, length)


def _plain(table: Any, rows: Any, dtype: Any) -> Any:
    tables = rows.shape[-1]
    rows = rows + jnp.arange(tables, dtype=rows.dtype)[None, None] * (table.shape[0] // tables)
    return jnp.sum(jnp.take(table, rows, axis=0).astype(dtype), -2)


if __name__ == "__main__":
    print(benchmark("hash_embedding", SHAPES, plan))
