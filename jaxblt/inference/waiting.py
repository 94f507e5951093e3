"""Rows whose patch has closed wait for each other, so that the latent stack reads its weights once for many of them.

A step reads a byte of each row up to the edge of its patch. Rows at an edge stand still until most rows are there, or
one has waited for long. Then one call of the latent stack serves them all. Other rows finish their byte and draw the
next one. What a row computes does not depend on when, so neither do its bytes.
"""

from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.inference.decode import Decoder, DecoderState, are_sound
from jaxblt.mixers.driver.base import select_rows
from jaxblt.models import LanguageModel
from jaxblt.models.blt_state import OpenByte
from jaxblt.show import show

SHARE = 0.6
"""The share of the rows with a byte that stand at an edge before the latent stack runs for them."""

MOST_STEPS = 4
"""Steps that a row stands still at the most."""


@runtime_checkable
class StepsInParts(LanguageModel, Protocol):
    """A model whose `step` stops where the latent stack may run: `BLT` says what its parts do."""

    def init_open_byte(self, batch_size: int) -> OpenByte: ...

    def open_byte(self, ids: Any, state: Any, **options: Any) -> tuple[OpenByte, Any]: ...

    def close_patches(self, byte: OpenByte, state: Any) -> Any: ...

    def finish_byte(self, byte: OpenByte, state: Any) -> tuple[Any, Any]: ...


@flax.struct.dataclass
class Waiting:
    """The rows that stand still.

    Attributes:
      byte: the open byte of each of them; other rows have none.
      sound: whether its entropy was finite.
      steps: for which each has stood.
    """

    byte: OpenByte
    sound: Bool[Array, "B"]
    steps: Int[Array, "B"]

    __repr__ = show

    @property
    def rows(self) -> Bool[Array, "B"]:
        """True for the rows that stand still."""
        return self.byte.segment_ids != 0

    def only(self, where: Bool[Array, "B"]) -> "Waiting":
        """Return these rows, without those that are given up."""
        return self.replace(byte=self.byte.only(where))  # pyright: ignore[reportAttributeAccessIssue]


def may_wait(decoder: Decoder, count: int) -> bool:
    """Return whether some of `count` rows may stand still: not a row alone, nor rows without a latent stack."""
    return count > 1 and isinstance(decoder.build(), StepsInParts)


def none_waiting(decoder: Decoder, count: int) -> Waiting | None:
    """Return a `Waiting` of no rows, or None if rows never wait."""
    if not may_wait(decoder, count):
        return None
    model: Any = decoder.build()
    return Waiting(model.init_open_byte(count), jnp.ones((count,), bool), jnp.zeros((count,), jnp.int32))


def step_or_wait(
    decoder: Decoder,
    params: dict[str, Any],
    ids: Int[Array, "B"],
    state: DecoderState,
    segment_ids: Int[Array, "B"],
    waiting: Waiting,
) -> tuple[Float[Array, "B V"], Bool[Array, "B"], DecoderState, Waiting]:
    """Do what `decode_step` does for the rows that do not stand still.

    Args:
      decoder, params, state: as for `decode_step`.
      ids: the next byte of each row; of those that stand still, any.
      segment_ids: document of each byte; 0 leaves the row as it was. A row that stands still has one all the same.
      waiting: the rows that stand still, of `none_waiting` or the step before.

    Returns:
      Logits, without meaning in rows that stand still now; whether the byte closed its patch; the state; and the rows
      that stand still now.
    """
    held = waiting.rows
    columns = (ids[:, None], state.entropy, jnp.where(held, 0, segment_ids)[:, None])
    entropies, entropy = decoder.next_entropies(params, *columns)
    model, variables = decoder.build(), decoder.variables(params, "model")
    given = {"segment_ids": columns[2][:, 0], "entropies": None if entropies is None else entropies[:, 0]}
    byte, moved = model.apply(variables, ids, state.model, **given, method="open_byte")
    closed, sound = byte.closed, jnp.where(held, waiting.sound, are_sound(entropies, columns[2]))
    byte = select_rows(held, waiting.byte, byte)
    steps = jnp.where(held, waiting.steps + 1, 0)
    stays = byte.stands & ~_has_to_run(byte, steps)
    ready = byte.only(~stays)
    moved = model.apply(variables, ready, moved, method="close_patches")
    logits, moved = model.apply(variables, ready, moved, method="finish_byte")
    logits = jnp.where(sound[:, None], logits, jnp.nan)
    return logits, closed, DecoderState(moved, entropy), Waiting(byte.only(stays), sound, steps)


def _has_to_run(byte: OpenByte, steps: Int[Array, "B"]) -> Bool[Array, ""]:
    """Return whether the latent stack runs in this step, if a row stands at an edge."""
    at_edge, live = (jnp.sum(x, dtype=jnp.float32) for x in (byte.stands, byte.segment_ids != 0))
    return (at_edge >= SHARE * live) | jnp.any(byte.stands & (steps >= MOST_STEPS))
