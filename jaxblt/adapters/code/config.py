"""What a router reads, how often it gives a code, and what stands before its first one."""

import dataclasses
from typing import Any, Literal

from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.code.levels import Level, levels_of
from jaxblt.adapters.code.prefix import Prefix
from jaxblt.adapters.code.reads import ChunkMean, Read
from jaxblt.adapters.code.recurrent_memory import RecurrentMemory
from jaxblt.adapters.code.side import Side
from jaxblt.adapters.code.traces import Traces
from jaxblt.validation import check_bounds, check_fields

FORMER = ("prefix", "memory", "side", "retrieval")
"""Fields of earlier versions, each of which said whether a router has one kind of read."""


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """What a router reads, and how often it gives a code; see `jaxblt.adapters.code.router.Router`.

    Attributes:
      level: one code for a document behind its prefix, one for each chunk, one for each token, or `Mixed`.
      chunk: steps C of a chunk, in the document's own time.
      lag: chunks back that a code looks: chunk k reads chunk k - lag. With 2 a code is known a chunk ahead.
      reads: what codes are made of, in the order of their features: `ChunkMean`, `Prefix`, `Side`, `Traces`,
        `RecurrentMemory`, `Neighbours`, or a `Read` of your own. A code of a token reads the token besides.
      hidden: width of the hidden layer, and of a memory.
      fallback: numbers of the code before the first one: 1 for the static adapter, 0 for the base.
      packed, segment_alignment: what the data's packing promises of rows, as for mixers; see `RowLayout`.
      per: "stack" for one router, which reads the stack's input. "block" for one in each block: it reads that block's
        input before its norm, and scales that block's sites.
    """

    level: Level | Mixed = "chunk"
    chunk: int = 64
    lag: int = 1
    reads: tuple[Any, ...] = (ChunkMean(), Prefix())
    hidden: int = 64
    fallback: float = 1.0
    packed: bool = True
    segment_alignment: int = 1
    per: Literal["stack", "block"] = "stack"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "chunk", "lag", "hidden", "segment_alignment", least=1)
        if self.fallback not in (0, 1):
            raise ValueError(
                f"RouterConfig.fallback must be 1 for the static adapter or 0 for the base, got {self.fallback!r}"
            )
        self._check_reads()

    def _check_reads(self) -> None:
        for read in self.reads:
            if not isinstance(read, Read):
                fix = f": call it, {read.__name__}(...)" if isinstance(read, type) else ""
                raise ValueError(f"RouterConfig.reads must hold reads such as Prefix(16), got {read!r}{fix}")
        names = [read.name for read in self.reads]
        for read in self.reads:
            if names.count(read.name) > 1:
                both = " and ".join(str(other) for other in self.reads if other.name == read.name)
                raise ValueError(
                    f"RouterConfig.reads names {both}, whose states and parameters are called {read.name!r}: leave one "
                    "out"
                )
        for read in self.reads:
            read.check(self)
        for level in levels_of(self):
            needed = self.reads_of(Prefix) if level == "prefix" else self.reads
            if level != "token" and not any(read.width(self, 1, level) for read in needed):
                fix = "Prefix(128)" if level == "prefix" else "ChunkMean()"
                raise ValueError(
                    f"RouterConfig.reads = {self.reads} holds nothing that level {level!r} reads: add {fix}"
                )

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Return fields as an earlier version stored them: a field for each kind of read, and `reads` for `per`."""
        fields = {name: value for name, value in stored.items() if name not in FORMER}
        if isinstance(fields.get("reads"), str):
            fields["per"] = fields.pop("reads")
        if not set(FORMER) & stored.keys():
            return fields
        known = {None: (), "gru": (RecurrentMemory(),), "traces": (Traces(),)}
        found = [reads for name, reads in known.items() if name == stored.get("memory")]
        if not found:
            raise ValueError(f"RouterConfig.memory = {stored['memory']!r}, expected one of {list(known)}")
        (memory,), steps = found, stored.get("prefix", Prefix.steps)
        side = (Side(stored["side"]),) if stored.get("side") else ()
        neighbours = (stored["retrieval"],) if stored.get("retrieval") else ()
        prefix = () if steps is None else (Prefix(steps),)
        return fields | {"reads": (ChunkMean(), *memory, *side, *neighbours, *prefix)}

    def reads_of[R: Read](self, kind: type[R]) -> tuple[R, ...]:
        """Return the reads of a class."""
        return tuple(read for read in self.reads if isinstance(read, kind))

    @property
    def prefix(self) -> int:
        """Steps that the prefix pools; 0 without one."""
        return sum(read.steps for read in self.reads_of(Prefix))

    @property
    def side(self) -> int:
        """Side features a token that the reads take."""
        return sum(read.side for read in self.reads)
