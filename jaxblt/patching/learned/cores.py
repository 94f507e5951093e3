"""Scores that look back, as cores of the sequence driver: rows may be whole, streamed, packed or split."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jaxblt.data.vocab import OFFSET
from jaxblt.mixers.driver.history import Recent, joined, recent
from jaxblt.mixers.driver.marks import Marks
from jaxblt.patching.learned.config import Matrix


@flax.struct.dataclass
class Previous:
    """Core of x_{t-1}, zero at a document's first byte. The carry is the last x."""

    @property
    def reach(self) -> int:
        """Bytes back that the carry tells of."""
        return 1

    def zero(self, x: Shaped[Array, "B T C"]) -> Shaped[Array, "B C"]:
        """Return a past without a byte."""
        return jnp.zeros_like(x[:, 0])

    def run(
        self, x: Shaped[Array, "B T C"], marks: Marks, carry: Shaped[Array, "B C"] | None
    ) -> tuple[Shaped[Array, "B T C"], Shaped[Array, "B C"]]:
        """Return each byte's predecessor, and the stretch's last byte."""
        first = self.zero(x) if carry is None else carry.astype(x.dtype)
        past = jnp.concatenate([first[:, None], x[:, :-1]], 1)
        if marks.new is not None:
            past = jnp.where(marks.new[..., None], jnp.zeros((), x.dtype), past)
        return past, self.summarise(x, marks)

    def summarise(self, x: Shaped[Array, "B T C"], marks: Marks) -> Shaped[Array, "B C"]:
        """Return the stretch's last byte."""
        if marks.end is None:
            return x[:, -1]
        last = jnp.maximum(marks.end - 1, 0)
        return jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]

    def join(self, carry: Shaped[Array, "B C"], summary: Shaped[Array, "B C"]) -> Shaped[Array, "B C"]:
        """Return the last byte behind the stretch."""
        return summary


@flax.struct.dataclass
class Responses:
    """Core of r_{t,k} = sum over l of table[l, byte t - l, k]. The stream is id + 1; the carry is that of R bytes.

    Attributes:
      table: weights by place counted back from the motif's end, id, and motif.
    """

    table: Float[Array, "L V K"]

    @property
    def reach(self) -> int:
        """Bytes back that the longest motif holds, at least one."""
        return reach_of(self.table.shape[0])

    def zero(self, ids: Int[Array, "B T"]) -> Int[Array, "B R"]:
        """Return a past without bytes."""
        return jnp.zeros((ids.shape[0], self.reach), ids.dtype)

    def run(
        self, ids: Int[Array, "B T"], marks: Marks, carry: Int[Array, "B R"] | None
    ) -> tuple[Float[Array, "B T K"], Recent]:
        """Return the responses, and the last bytes."""
        places, vocab, motifs = self.table.shape
        seen = jnp.concatenate([self.zero(ids) if carry is None else carry, ids], 1)
        by_id = jnp.swapaxes(self.table, 0, 1).reshape(vocab, places * motifs)
        # Keep one product for all places: the gradient of a lookup would be a scatter to a few rows
        found = jax.nn.one_hot(seen - 1, vocab, dtype=self.table.dtype) @ by_id
        found = found.reshape(*seen.shape, places, motifs)
        document = jnp.zeros_like(seen)
        if marks.new is not None:
            counted = jnp.cumsum(marks.new, axis=1, dtype=ids.dtype)
            document = jnp.concatenate([document[:, : self.reach], counted], 1)
        total = jnp.zeros((*ids.shape, motifs), self.table.dtype)
        for back in range(places):
            there = slice(self.reach - back, seen.shape[1] - back)
            same = document[:, there] == document[:, self.reach :]
            total += jnp.where(same[..., None], found[:, there, back], 0.0)
        return total, self.summarise(ids, marks)

    def summarise(self, ids: Int[Array, "B T"], marks: Marks) -> Recent:
        """Return the last bytes of the stretch."""
        return recent(ids, marks, self.reach)

    def join(self, carry: Int[Array, "B R"], summary: Recent) -> Int[Array, "B R"]:
        """Return the last bytes behind the stretch."""
        return joined(carry, summary)


def reach_of(length: int) -> int:
    """Return the bytes before the current one that motifs of `length` hold, at least one."""
    return max(length - 1, 1)


def motif_table(matrices: tuple[Matrix, ...], *, length: int, vocab_size: int) -> np.ndarray:
    """Return Float[L, V, K] of `Responses`: each matrix less its rows' least weights, its full match scaled to 1."""
    table = np.zeros((length, vocab_size, len(matrices)), np.float32)
    for k, matrix in enumerate(matrices):
        weights = np.asarray(matrix, np.float64)
        weights -= weights.min(1, keepdims=True)
        weights /= weights.max(1).sum()
        for base, letter in enumerate("ACGT"):
            for code in (letter, letter.lower()):
                table[: len(weights), ord(code) + OFFSET, k] = weights[::-1, base]
    return table
