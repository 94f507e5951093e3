"""The settings of an engine, and what a request asks of it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxblt.adapters.update.row_adapters import Adapter
from jaxblt.inference.beams import MOST_BEAMS
from jaxblt.inference.drafts import Drafts
from jaxblt.inference.sampling import SamplingConfig
from jaxblt.validation import MOST_SEED, check_bounds, check_fields, number, whole

MOST_PENALTY = 100.0
"""Penalties lie between this and its negative."""

TOP = 5
"""The most probable ids of each prediction that a piece holds."""

Finish = Literal["stop", "length", "cancelled", "expired"]
"""Why a request ended: EOS or a stop string, its limit, its reader, its deadline."""


@dataclass(frozen=True)
class Lane:
    """Rows that decode together, by one program.

    Attributes:
      slots: rows.
      capacity: the most bytes of a row: BOS, prompt and new bytes.
    """

    slots: int = 8
    capacity: int = 8192

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "slots", least=1, most=65_536)
        check_bounds(self, "capacity", least=2)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an `Engine`.

    Attributes:
      lanes: a request goes to the one of the smallest capacity that holds it.
      max_waiting: requests that wait while no slot is free for them; one more is refused.
      piece_bytes: bytes of prompts that a round reads at the most while rows decode, rounded to whole blocks of a model
        with patches. While none decodes, a round reads all prompts of at most 256 bytes, if a piece is longer.
      prefix_bytes: memory for the states behind prompts, so that a prompt that begins alike is not read again.
      drafts: bytes to guess, so that one call of the model checks several; None draws byte by byte. Any `Drafts` give
        the same bytes. Without drafts logits are rounded otherwise.
      beams: rows of a beam search that `warm` compiles for; searches of up to as many beams run in them. More beams, or
        beams that hold more bytes together than the largest lane, compile programs of their own; 0 compiles for none.
    """

    lanes: tuple[Lane, ...] = (Lane(),)
    max_waiting: int = 256
    piece_bytes: int = 1024
    prefix_bytes: int = 0
    drafts: Drafts | None = None
    beams: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "max_waiting", "piece_bytes", least=1)
        check_bounds(self, "beams", least=0, most=MOST_BEAMS)
        check_bounds(self, "prefix_bytes", least=0, most=2**53)
        if not self.lanes:
            raise ValueError("EngineConfig.lanes must hold at least one Lane(slots, capacity), got ()")
        if self.beams and not self.search_lanes:
            most = max(lane.slots * lane.capacity for lane in self.lanes)
            least = min(lane.capacity for lane in self.lanes)
            raise ValueError(
                f"EngineConfig.beams={self.beams} rows of {least} bytes or more exceed the largest lane, of {most} "
                f"bytes in all: give a lane more slots, or use at most {most // least} beams"
            )

    @property
    def search_lanes(self) -> tuple[int, ...]:
        """Lanes whose capacity the rows of a compiled beam search may have: together they exceed no lane."""
        most = max(lane.slots * lane.capacity for lane in self.lanes)
        return tuple(i for i, lane in enumerate(self.lanes) if 0 < self.beams * lane.capacity <= most)


@dataclass(frozen=True)
class Sampling:
    """How the bytes of a request are drawn.

    Attributes:
      temperature, top_k, top_p: as of `jaxblt.inference.SamplingConfig`.
      seed: with the place of a byte in its document it makes the key that draws it.
      stop: strings of bytes; the request ends before the first that comes.
      alphabet: bytes that may be drawn, EOS besides; None for all.
      frequency_penalty: subtracted from a byte's logit as often as the request has drawn it.
      presence_penalty: subtracted from the logits of bytes that the request has drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[bytes, ...] = ()
    alphabet: bytes | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "seed", least=0, most=MOST_SEED)
        penalties = ("frequency_penalty", "presence_penalty")
        check_bounds(self, *penalties, least=-MOST_PENALTY, most=MOST_PENALTY)
        for name, values in (("stop", self.stop), ("alphabet", (self.alphabet,))):
            if b"" in values:
                raise ValueError(f"Sampling.{name} holds b'', which is no byte: leave it out")
        self.config  # noqa: B018

    @property
    def config(self) -> SamplingConfig:
        """Temperature, top_k and top_p."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Request:
    """A prompt and what is wanted behind it.

    Attributes:
      prompt: may be empty; a BOS comes before it.
      max_new_bytes: the most bytes to draw.
      sampling: how.
      deadline_s: seconds after which it ends, whether it waits or decodes; None for no limit.
      max_unread: bytes that may wait for a slow reader, who is cancelled beyond; None for no limit.
      adapter: of a model with a router, one of `Engine.adapters`; None for the code that the router makes.
    """

    prompt: bytes
    max_new_bytes: int = 256
    sampling: Sampling = Sampling()
    deadline_s: float | None = None
    max_unread: int | None = None
    adapter: Adapter = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, bytes):
            fix = "call its encode()" if isinstance(self.prompt, str) else "make it bytes"
            raise ValueError(f"Request.prompt must be bytes, got {self.prompt!r:.40}: {fix}")
        check_fields(self)
        check_bounds(self, "max_new_bytes", "max_unread", least=1)
        if isinstance(self.adapter, int):
            whole("Request.adapter", self.adapter, least=0)
        if self.deadline_s is not None:
            number("Request.deadline_s", self.deadline_s, above=0)

    @property
    def length(self) -> int:
        """Bytes of the prompt, and its BOS."""
        return len(self.prompt) + 1


@dataclass(frozen=True, eq=False)
class Piece:
    """The next bytes of a request.

    Attributes:
      data: the bytes.
      entropies: nats, of the model's predictions that they were drawn from, before temperature and penalties.
      logprobs: nats, of these bytes under the predictions.
      closed: whether a patch ended with each byte.
      top_ids, top_logprobs: the most probable ids of each prediction, best first; a byte's id is byte + 4, EOS is 2.
      finish: why the request ended; None while it goes on.
    """

    data: bytes
    entropies: np.ndarray
    logprobs: np.ndarray
    closed: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    finish: Finish | None = None


ARRAYS = ("entropies", "logprobs", "closed", "top_ids", "top_logprobs")
"""Members of a piece with an entry for each byte."""


def join_pieces(pieces: list[Piece]) -> Piece:
    """Return the pieces of a request as one."""
    arrays = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in ARRAYS}
    return Piece(b"".join(piece.data for piece in pieces), **arrays, finish=pieces[-1].finish)
