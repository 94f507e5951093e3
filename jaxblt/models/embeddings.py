"""Byte embeddings with hashed n-grams: what a model knows of a byte before it looks around."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxblt.array_checks import check_ids, check_rows, check_segments
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.einsums import multiply
from jaxblt.layers import named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.history import Recent, joined, recent
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import read, splits_call
from jaxblt.parallel.constraints import by_token, whole_weight
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis
from jaxblt.validation import MOST, check_bounds, check_fields
from pallas_kernels.hash_embedding import hash_embedding, ngram_rows
from pallas_kernels.runtime import OwnGradient, has_reference_ops, vary_alike

TABLE_AXES = ("vocab", "embed")
MOST_GRAM = 256
"""Bytes of the longest n-gram: each byte's hash is a sum over as many."""


@dataclasses.dataclass(frozen=True)
class HashConfig:
    """Hashed n-gram tables (Byte Latent Transformer, 2412.09871, sec. 3.2.1).

    Attributes:
      sizes: the values of n; each n-gram ends at the byte.
      table_size: number of rows of each table.
      functions: number of hash functions, each with its own tables.
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
    def divisor(self) -> float:
        """The number that the sum of rows is divided by, so that it is as large as one row."""
        return self.num_tables**0.5

    @property
    def reach(self) -> int:
        """Bytes before the current one that the longest n-gram holds."""
        return max(self.sizes) - 1

    def rows(self, ids: Any, history: Any, run: Any) -> Int[Array, "B T G"]:
        """Return the row of each table.

        See `pallas_kernels.hash_embedding.ngram_rows`.
        """
        return ngram_rows(
            ids,
            history,
            run,
            sizes=self.sizes,
            table_size=self.table_size,
            functions=self.functions,
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
    """Raise ValueError unless a config's `vocab_size` has room for the ids of bytes."""
    check_bounds(config, "vocab_size", least=VOCAB_SIZE, why=": the ids of bytes and four special ones")


def embed(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Read rows of a small table.

    The gradient is a matmul with the one-hot ids, summed in fp32. JAX's own scatter-add would send every byte of a
    batch to a few hundred rows, four for DNA. On a GPU its atomics queue up for longer than the rest of the step takes.
    In bf16 they lose small terms.
    """
    if has_reference_ops():
        return _rows(table, ids)
    return _embed(*vary_alike(table, ids))


def _rows(table: Float[Array, "V D"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    return jnp.take(table, ids, axis=0)


def _embed_forward(table: Array, ids: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows(table, ids), (ids, table)


def _embed_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    ids, table = saved
    chosen = jax.nn.one_hot(ids, table.shape[0], dtype=gradient.dtype)
    summed = jnp.einsum("btv,btd->vd", chosen, gradient, preferred_element_type=jnp.float32)
    return summed.astype(table.dtype), np.zeros(ids.shape, jax.dtypes.float0)


_embed = OwnGradient(_rows)
_embed.defvjp(_embed_forward, _embed_backward)


def check_embedding_state(config: EmbeddingConfig, state: Any) -> Any:
    """Return `state`, or raise ValueError unless it has n-grams where `config` has some.

    None says that a call has no state, so the embedding itself cannot tell.
    """
    if (state is None) != (config.hash is None):
        held, own = ("without" if none else "with" for none in (state is None, config.hash is None))
        raise ValueError(
            f"the state is of an embedding {held} n-grams, and the config has one {own}: make it by init_state of the "
            "same config"
        )
    return state


class ByteEmbedding(nn.Module):
    """e(id_t) plus the scaled sum of the n-gram rows that end at t; `attend` reads the byte table as a head."""

    config: EmbeddingConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        config = self.config
        init = nn.initializers.normal(0.02)
        shape = (config.vocab_size, config.dim)
        self.table = self.param("bytes", named(init, *TABLE_AXES), shape, jnp.float32)
        if config.hash is not None:
            rows = config.hash.num_tables * config.hash.table_size
            self.hash_table = self.param(
                "hash_ngrams", named(init, "hash", "embed"), (rows, config.dim), jnp.float32
            )

    def __call__(
        self, ids: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None, state: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return embeddings, and the state after these bytes (None without one).

        Raises:
          ValueError: ids are no rows; or (outside of jit) an id or segment id is out of range.
        """
        check_rows("ids", ids)
        check_ids(ids, self.config.vocab_size)
        if segment_ids is not None:
            check_segments(segment_ids)
        split = state is None or splits_call(ids.shape[1])
        x = by_token(embed(whole_weight(self.table, TABLE_AXES), ids).astype(self.dtype), split=split)
        if self.config.hash is None:
            return x, state
        clock, history = (None, None) if state is None else state
        tokens = read((ids + 1)[..., None], segment_ids, None, clock)
        hashed, history = tokens.run(Grams(self.config.hash), tokens.x[..., 0], history)
        split = state is None and seq_axis(ids) is not None
        island = over_sequence if split else over_batch
        grams = island(partial(_sums, self.dtype), tokens.restore(hashed), shared=self.hash_table)
        x = x + grams / jnp.asarray(self.config.hash.divisor, self.dtype)
        return x, None if state is None else (tokens.clock, history)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return logits in fp32 with the byte table as the head (tied)."""
        table = whole_weight(self.table.astype(x.dtype), TABLE_AXES)
        return multiply("btd,vd->btv", x, table, preferred_element_type=jnp.float32)


def _sums(dtype: Any, rows: Int[Array, "B T G"], *others: Any) -> Float[Array, "B T D"]:
    """Sum the rows of each byte's n-grams; the tables come last in an island's arguments."""
    return hash_embedding(others[-1], rows, dtype=dtype)


@flax.struct.dataclass
class Grams:
    """Core of n-grams: the row of each table from id + 1 of each byte. The carry is that of the R bytes before."""

    config: HashConfig = flax.struct.field(pytree_node=False)

    @property
    def reach(self) -> int:
        """Bytes back that the longest n-gram holds."""
        return self.config.reach

    def zero(self, ids: Int[Array, "B T"]) -> UInt32[Array, "B R"]:
        """Return a past without bytes."""
        return jnp.zeros((ids.shape[0], self.reach), jnp.uint32)

    def run(
        self, ids: Int[Array, "B T"], marks: Marks, carry: UInt32[Array, "B R"] | None
    ) -> tuple[Int[Array, "B T G"], Recent]:
        """Return rows of the tables, and the last bytes."""
        history = self.zero(ids) if carry is None else carry
        document = None if marks.new is None else jnp.cumsum(marks.new, axis=1, dtype=jnp.int32)
        return self.config.rows(ids - 1, history, document), self.summarise(ids, marks)

    def summarise(self, ids: Int[Array, "B T"], marks: Marks) -> Recent:
        """Return the last bytes of the stretch."""
        return recent(ids.astype(jnp.uint32), marks, self.reach)

    def join(self, carry: UInt32[Array, "B R"], summary: Recent) -> UInt32[Array, "B R"]:
        """Return the last bytes behind the stretch."""
        return joined(carry, summary)


def init_embedding_state(
    config: EmbeddingConfig, batch_size: int
) -> tuple[Clock, UInt32[Array, "B R"]] | None:
    """Return the state before the first byte, or None without n-grams.

    It holds the bytes that the longest n-gram reaches back to.
    """
    if config.hash is None:
        return None
    return start_clock(batch_size), jnp.zeros((batch_size, config.hash.reach), jnp.uint32)
