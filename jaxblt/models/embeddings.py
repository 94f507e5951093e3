"""Byte embeddings with hashed n-grams: what a model knows of a byte before it looks around."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxblt.array_checks import check_ids, check_rows, check_segments
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.mixers.base import Clock, arrange, last_run, named, start_clock
from jaxblt.parallel.halo import before, by_stretch, splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis
from jaxblt.validation import MOST, check_bounds, check_fields
from pallas_kernels.hash_embedding import hash_embedding, ngram_rows

MOST_GRAM = 256
"""Bytes of the longest n-gram: each byte's hash is a sum over as many."""


@dataclasses.dataclass(frozen=True)
class HashConfig:
    """Hashed n-gram tables (Byte Latent Transformer, 2412.09871, sec. 3.2.1).

    Attributes:
      sizes: the n of the n-grams, each ending at the byte.
      table_size: rows of each table.
      functions: hash functions, each with tables of its own.
    """

    sizes: tuple[int, ...] = (3, 4, 5, 6, 7, 8)
    table_size: int = 30_000
    functions: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "sizes", least=2, most=MOST_GRAM)
        check_bounds(self, "table_size", least=1)
        check_bounds(self, "functions", least=1, most=64)
        if not self.sizes:
            raise ValueError(
                "HashConfig.sizes must hold an n of at least 2, got (): set hash=None for no n-grams"
            )
        if self.num_tables * self.table_size > MOST:
            raise ValueError(
                f"{self.num_tables} hash tables of table_size={self.table_size} rows have more rows than int32 counts: "
                f"use at most {MOST // self.num_tables}"
            )

    @property
    def num_tables(self) -> int:
        """Tables in all."""
        return len(self.sizes) * self.functions

    @property
    def reach(self) -> int:
        """Bytes before the current one that the longest n-gram holds."""
        return max(self.sizes) - 1

    def rows(self, ids: Any, history: Any, run: Any, history_run: Any = None) -> Int[Array, "B T G"]:
        """The row of each table: `pallas_kernels.hash_embedding.ngram_rows` with these sizes."""
        return ngram_rows(
            ids,
            history,
            run,
            sizes=self.sizes,
            table_size=self.table_size,
            functions=self.functions,
            history_run=history_run,
        )


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """Byte embedding of width `dim`, with hashed n-grams unless `hash` is None."""

    dim: int = 256
    hash: HashConfig | None = None
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", least=1)
        check_vocab_size(self)


def check_vocab_size(config: Any) -> None:
    """Raises ValueError unless a config's `vocab_size` has room for the ids of bytes."""
    check_bounds(config, "vocab_size", least=VOCAB_SIZE, why=": the ids of bytes and four special ones")


@jax.custom_vjp
def embed(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of a small table, with a gradient that is a matmul with the one-hot ids, summed in fp32.

    The scatter-add that JAX would make sends every byte of a batch to a few hundred rows, four for DNA: on a GPU its
    atomics queue up for longer than the rest of the step takes, and in bf16 they lose small terms.
    """
    return jnp.take(table, ids, axis=0)


def _embed_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return embed(table, ids), (ids, table)


def _embed_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    ids, table = saved
    chosen = jax.nn.one_hot(ids, table.shape[0], dtype=gradient.dtype)
    summed = jnp.einsum("btv,btd->vd", chosen, gradient, preferred_element_type=jnp.float32)
    return summed.astype(table.dtype), np.zeros(ids.shape, jax.dtypes.float0)


embed.defvjp(_embed_forward, _embed_backward)


class ByteEmbedding(nn.Module):
    """e(id_t) plus the scaled sum of the n-gram rows that end at t; `attend` reads the byte table as a head."""

    config: EmbeddingConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        config = self.config
        init = nn.initializers.normal(0.02)
        shape = (config.vocab_size, config.dim)
        self.table = self.param("bytes", named(init, "vocab", "embed"), shape, jnp.float32)
        if config.hash is not None:
            rows = config.hash.num_tables * config.hash.table_size
            self.hash_table = self.param(
                "hash_ngrams", named(init, "hash", "embed"), (rows, config.dim), jnp.float32
            )

    def __call__(
        self, ids: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None, state: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Embeddings, and the state after these bytes (None without one).

        Raises:
          ValueError: ids are no rows; or (outside of jit) an id or segment id is out of range.
        """
        check_rows("ids", ids)
        check_ids(ids, self.config.vocab_size)
        if segment_ids is not None:
            check_segments(segment_ids)
        x = embed(self.table, ids).astype(self.dtype)
        if self.config.hash is None:
            return x, state
        split = state is None and seq_axis() is not None
        rows, state = self._rows(ids, segment_ids, state)
        island = over_sequence if split else over_batch
        grams = island(partial(_sums, self.dtype), rows, shared=self.hash_table)
        return x + grams / jnp.asarray(self.config.hash.num_tables**0.5, self.dtype), state

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in fp32 with the byte table as the head (tied)."""
        return jnp.einsum("btd,vd->btv", x, self.table.astype(x.dtype), preferred_element_type=jnp.float32)

    def _rows(self, ids: Any, segment_ids: Any, state: Any) -> tuple[Any, Any]:
        config = self.config.hash
        assert config is not None
        if state is None:
            return by_stretch(partial(_own_rows, config), (ids, segment_ids)), None
        clock, history = state
        tokens, clock = arrange((ids + 1)[..., None], segment_ids, None, clock)
        rows = config.rows(tokens.x[..., 0] - 1, history, tokens.run)
        back = jnp.argsort(tokens.order, axis=1)
        return jnp.take_along_axis(rows, back[..., None], 1), (clock, _recent(tokens, history))


def _sums(dtype: Any, rows: Int[Array, "B T G"], *others: Any) -> Float[Array, "B T D"]:
    """Sums over each byte's n-grams; the tables come last in an island's arguments."""
    return hash_embedding(others[-1], rows, dtype=dtype)


def _own_rows(config: HashConfig, own: Any) -> Int[Array, "B T G"]:
    """The n-gram rows of whole rows, or of a stretch of them whose first bytes reach into the one before."""
    ids, segment_ids = own
    history = jnp.zeros((ids.shape[0], config.reach), jnp.uint32)
    if not splits_sequence():
        return config.rows(ids, history, segment_ids)
    history = before((ids + 1).astype(jnp.uint32), config.reach, axis=1)
    documents = None if segment_ids is None else before(segment_ids, config.reach, axis=1)
    return config.rows(ids, history, segment_ids, documents)


def _recent(tokens: Any, history: UInt32[Array, "B R"]) -> UInt32[Array, "B R"]:
    """The last R bytes of each row's document, after this call's tokens."""
    reach = history.shape[1]
    final = last_run(tokens)[:, None]
    seen = jnp.concatenate([history, tokens.x[..., 0].astype(jnp.uint32)], 1)
    runs = jnp.concatenate([jnp.zeros_like(history, jnp.int32), tokens.run], 1)
    count = jnp.sum(tokens.live, 1, keepdims=True, dtype=jnp.int32)
    index = count + jnp.arange(reach, dtype=jnp.int32)[None]
    kept = jnp.take_along_axis(runs, index, 1) == final
    return jnp.where(kept, jnp.take_along_axis(seen, index, 1), jnp.uint32(0))


def init_embedding_state(
    config: EmbeddingConfig, batch_size: int
) -> tuple[Clock, UInt32[Array, "B R"]] | None:
    """The state before the first byte: the bytes that the longest n-gram reaches back to; None without n-grams."""
    if config.hash is None:
        return None
    return start_clock(batch_size), jnp.zeros((batch_size, config.hash.reach), jnp.uint32)
