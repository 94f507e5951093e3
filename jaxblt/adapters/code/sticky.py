"""Top-1 of a bank with hysteresis: an expert stays until another one is clearly better."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.driver.marks import Marks
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class Sticky:
    """One-hot code of a bank. Expert i follows e only if its number is larger than that of e by more than tau.

    The first code of a document takes the largest number, as there is no expert to stay with. Gradients are those of
    the code before (straight through, 1308.3432, sec. 4): every expert's number has one.

    Attributes:
      tau: margin, of numbers that sum to 1; 0 for top-1 without hysteresis.
    """

    tau: float = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "tau", least=0, below=1, why=": it is a difference of two shares")

    def check(self, adapter: Any) -> None:
        """Raise ValueError for a code that is no bank's."""
        if adapter.blocks is None:
            raise ValueError(
                "Sticky chooses an expert of a bank, and blocks is None: set the number of experts"
            )

    def init_state(self, batch_size: int, numbers: int) -> Int[Array, "B"]:
        """Return the expert before the first token: none, which is the number E."""
        return jnp.full((batch_size,), numbers, jnp.int32)

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the one-hot code; the fallback where there is no expert yet."""
        numbers = code.shape[-1]
        scores = jax.lax.stop_gradient(code)
        may = (moment.changes & moment.known)[..., None]
        chosen, after = rows.run(Switches(self.tau), (scores, may), state)
        one = (chosen[..., None] == jnp.arange(numbers, dtype=jnp.int32)[None, None]).astype(code.dtype)
        return jnp.where((chosen < numbers)[..., None], one + (code - scores), code), after


@flax.struct.dataclass
class Switches:
    """Core of the choice of an expert: of E, or none. Streams are scores [B, T, E] and where one may change [B, T, 1].

    What a token does to the expert before it is a table [E + 1]. Tables are composed, so that stretches can be joined.

    Attributes:
      tau: margin.
    """

    tau: float = flax.struct.field(pytree_node=False)

    def zero(self, streams: Any) -> Int[Array, "B"]:
        """Return no expert."""
        scores = streams[0]
        return jnp.full(scores.shape[:1], scores.shape[2], jnp.int32)

    def run(
        self, streams: Any, marks: Marks, carry: Int[Array, "B"] | None
    ) -> tuple[Int[Array, "B T"], Int[Array, "B N"]]:
        """Return the expert at each token, and the table of the stretch."""
        tables = jax.lax.associative_scan(_then, self._tables(streams, marks), axis=1)
        before = self.zero(streams) if carry is None else carry
        before = jnp.broadcast_to(before[:, None, None], (*tables.shape[:2], 1))
        return jnp.take_along_axis(tables, before, -1)[..., 0], tables[:, -1]

    def join(self, carry: Int[Array, "B"], summary: Int[Array, "B N"]) -> Int[Array, "B"]:
        """Return the expert behind a stretch."""
        return jnp.take_along_axis(summary, carry[:, None], 1)[:, 0]

    def _tables(self, streams: Any, marks: Marks) -> Int[Array, "B T N"]:
        scores, changes = streams
        stay = jnp.arange(scores.shape[2] + 1, dtype=jnp.int32)[None, None]
        best = jnp.argmax(scores, -1, keepdims=True).astype(jnp.int32)
        beaten = jnp.max(scores, -1, keepdims=True) > scores + jnp.float32(self.tau)
        moved = jnp.concatenate([jnp.where(beaten, best, stay[..., :-1]), best], -1)
        tables = jnp.where(changes, moved, stay)
        if marks.segment_ids is None or marks.new is None:
            return tables
        # Begin a document without an expert, whatever came before it
        tables = jnp.where(marks.new[..., None], tables[..., -1:], tables)
        return jnp.where((marks.segment_ids != 0)[..., None], tables, stay)


def _then(first: Int[Array, "B T N"], second: Int[Array, "B T N"]) -> Int[Array, "B T N"]:
    return jnp.take_along_axis(second, first, -1)
