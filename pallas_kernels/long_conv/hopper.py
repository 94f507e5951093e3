"""The calls that the Hopper kernel takes, and rows in its tiles, known without importing Pallas' GPU dialect."""

from typing import Any, NamedTuple

from pallas_kernels._dispatch import Device
from pallas_kernels._hopper import CHUNK, ROWS, why_not_streams
from pallas_kernels.long_conv.monarch import LONGEST

BOX = 8 * CHUNK
"""Steps of the smallest box that the copy engine moves of a row that is a matrix of its own."""

TILE = CHUNK * ROWS
"""Points of a class: the DFT of 64 x 64."""

CLASSES = 4
"""Classes of the longest row: their spectra lie in shared memory, and their sums in registers."""

PAIR = 2
"""Classes of the longest row whose gradients take one pass, one for each warpgroup: four streams and both spectra of
more do not fit on chip."""

LONG_CLASSES = 8
"""Classes of the longest row that two warpgroups share; more tiles do not fit into shared memory."""

LONGEST_ON_CHIP = LONG_CLASSES * TILE
"""Above it XLA takes rows apart into classes of frequencies, and the kernel transforms classes."""

MOST_STEPS = 2**30
"""Points of a channel's rows that do not fit on chip: twice as many numbers in fp16, one array, would be 2^31."""

TIMED = 1024
"""Steps of the shortest row that was timed."""

PACKED = LONGEST_ON_CHIP
"""Steps of the longest packed row whose GPU tests have run."""

FEW = 32
"""Rows of all channels together that leave most multiprocessors idle: with as many `xla` was faster forward and
`monarch` with gradients, timed at both ends of `ON_CHIP`."""

ON_CHIP = range(PAIR * TILE, LONGEST_ON_CHIP + 1)
"""Steps of rows for which `FEW` was timed."""

TOGETHER = (8, 4, 2)
"""Short rows that may share a tile."""


class Ring(NamedTuple):
    """M = classes x height x 64 points a row.

    Attributes:
      classes: of frequencies, each a DFT of 4,096 points; tiles of a row.
      together: rows in a tile; more than one only in one class.
    """

    classes: int
    together: int

    @classmethod
    def of(cls, length: int, batch: int) -> "Ring":
        """Return the ring for rows of so many steps.

        Rows share tiles if that fills them.
        """
        if length > TILE // 2:
            ring = cls(-(-length // TILE), 1)
            return ring.even if ring.classes > CLASSES else ring
        fitting = (n for n in TOGETHER if batch % n == 0 and n * length <= TILE)
        return cls(1, next(fitting, 1))

    @property
    def even(self) -> "Ring":
        """The ring for two warpgroups that share a row: as many classes for each."""
        return self._replace(classes=self.classes + self.classes % 2)

    @property
    def height(self) -> int:
        """Chunks of 64 steps that a row has in a tile."""
        return ROWS // self.together

    @property
    def shifts(self) -> bool:
        """Twiddles of all classes do not fit into shared memory: those of class 0 are shifted."""
        return self.classes == CLASSES

    @property
    def points(self) -> int:
        return self.classes * self.height * CHUNK

    @property
    def stages(self) -> tuple[int, ...]:
        """Radices whose spectra have the kernel's order: class, then k_1, then k_2."""
        return (self.height, CHUNK) if self.classes == 1 else (self.classes, self.height, CHUNK)


def is_read_flat(rows: int, length: int) -> bool:
    """Return whether so many rows in all are read where they lie.

    They are no longer than fits on chip.
    """
    # Ask for a chunk of its own in each row, and for an array no smaller than a tile.
    return length % BOX != 0 and length >= BOX and rows * length >= TILE


def why_not(
    device: Device,
    x: Any,
    filter: Any,
    *,
    pre_gate: Any = None,
    post_gate: Any = None,
    **_: Any,
) -> str | None:
    """Return why the kernel cannot run such a call, or None."""
    if refused := why_not_streams(device, x, pre_gate, post_gate):
        return refused
    if x.shape[2] > LONGEST:
        return f"it takes rows of at most {LONGEST} steps, not {x.shape[2]}"
    rows, points = x.shape[0], -(-x.shape[2] // LONGEST_ON_CHIP) * LONGEST_ON_CHIP
    if points > LONGEST_ON_CHIP and rows * points >= MOST_STEPS:
        return (
            f"{rows} rows of {points} points a channel have spectra of 2^31 numbers or more: split the batch"
        )
    return None


def rather_not(device: Device, x: Any, filter: Any, *, segment_ids: Any = None, **_: Any) -> str | None:
    """Return why a slower form goes first, or None where the kernel was timed and is faster."""
    rows, length = x.shape[0] * x.shape[1], x.shape[2]
    if length < TIMED:
        return f"it has not been timed below {TIMED:,} steps"
    if segment_ids is not None and length > PACKED:
        return f"packed rows above {PACKED:,} steps have not run in it"
    if rows <= FEW and length in ON_CHIP:
        return f"{rows} rows of all channels leave most multiprocessors idle"
    return None


def rather_not_half(device: Device, x: Any, filter: Any, *, segment_ids: Any = None, **_: Any) -> str | None:
    """Return why a slower form goes before the kernel with fp16 between its stages, or None."""
    if refused := rather_not(device, x, filter, segment_ids=segment_ids):
        return refused
    return None if segment_ids is None else "its GPU tests are of one document a row"
