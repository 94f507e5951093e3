"""Pathfinder: whether two discs lie on one dashed contour (Linsley et al. 2018, 1805.08315; Tay et al., 2011.04006)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.tasks.generated import GeneratedTask
from jaxblt.data.tasks.pixels.contours import DEGREES, Canvas, Contour, Segment, Shapes, make_shapes
from jaxblt.data.tasks.pixels.raster import MOST_SIDE, raster_row
from jaxblt.data.tasks.pixels.stamps import Paddle, disc
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.validation import check_bounds

LONG_TRIES = 10_000
"""Tries of both long contours, before an image has no room for them; at the defaults some 20 are taken."""
SHORT_TRIES = 5
"""Tries of a contour between the two long ones, before the image goes without it."""


class Picture(NamedTuple):
    """An image and its label.

    Attributes:
      pixels: UInt8[size, size], of which 0 is black.
      label: 1 if the discs are the two ends of one contour, 0 if they are ends of two.
    """

    pixels: np.ndarray
    label: int


@dataclass(frozen=True, kw_only=True)
class Pathfinder(GeneratedTask):
    """Two long dashed contours, shorter ones between them, and two discs: are these the ends of one contour?

    The label is drawn first, by a fair coin. One disc lies on the first end of a contour. The other lies on the last
    end of the same contour (label 1) or of the other one (label 0). A row holds the bytes of the pixels, from left to
    right and from top to bottom, and answers behind the last one. Defaults are those of Long Range Arena's hard set of
    32 x 32 pixels; `path_x()` and `path_256()` are its larger ones.

    Attributes:
      size: pixels of a side.
      contours: segments of the long contours; each image draws one of these numbers.
      short_contour: segments of the contours between them.
      short_contours: how many of these.
      paddle_length, paddle_thickness: of a segment, in pixels.
      margins: pixels round a segment that others keep clear of; each image draws one.
      padding: pixels at each edge without contours.
      seed_distance: pixels between the first ends of the long contours, at least twice as far from all edges.
      marker_radius: of the discs.
      continuity: how straight contours go; at 1 they may turn by up to 90 degrees.
      contrast, short_contrast: brightness of the long contours and of the others. That of the discs is 1, and the
        brightest pixel of an image is made 255.
      antialias: how many times finer shapes are drawn than the image.
    """

    size: int = 32
    contours: tuple[int, ...] = (14,)
    short_contour: int = 4
    short_contours: int = 5
    paddle_length: int = 2
    paddle_thickness: float = 0.5
    margins: tuple[int, ...] = (1,)
    padding: int = 1
    seed_distance: int = 7
    marker_radius: float = 1.5
    continuity: float = 1.0
    contrast: float = 1.5
    short_contrast: float = 2.0
    antialias: int = 2

    num_answers = 2

    @classmethod
    def path_x(cls) -> "Pathfinder":
        """Return the task of 128 x 128 pixels, in rows of 16,384 bytes."""
        return cls(
            size=128,
            short_contours=8,
            paddle_length=5,
            paddle_thickness=1.5,
            margins=(2, 3),
            seed_distance=20,
            marker_radius=3.0,
            continuity=1.8,
            contrast=0.9,
            short_contrast=0.9,
        )

    @classmethod
    def path_256(cls) -> "Pathfinder":
        """Return the task of 256 x 256 pixels, in rows of 65,536 bytes."""
        return cls(
            size=256,
            short_contours=7,
            paddle_length=5,
            paddle_thickness=2.0,
            margins=(3,),
            padding=22,
            seed_distance=27,
            marker_radius=5.0,
            continuity=1.8,
            contrast=1.0,
            short_contrast=1.0,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "size", least=8, most=MOST_SIDE)
        check_bounds(self, "contours", least=2)
        check_bounds(self, "short_contour", "paddle_length", "padding", "seed_distance", "antialias", least=1)
        check_bounds(self, "short_contours", least=0)
        check_bounds(self, "margins", least=1)
        check_bounds(
            self, "paddle_thickness", "marker_radius", "continuity", "contrast", "short_contrast", above=0
        )
        for name in ("contours", "margins"):
            if not getattr(self, name):
                raise ValueError(f"Pathfinder.{name} must hold a number to draw, got (): name at least one")
        reach = self.paddle_length + max(self.margins)
        if not 4 * reach <= 4 * self.seed_distance < self.size:
            raise ValueError(
                f"Pathfinder.seed_distance must be at least paddle_length = {self.paddle_length} and the widest of "
                f"margins = {self.margins}, and below a quarter of size = {self.size}, got {self.seed_distance}"
            )
        fine = self.paddle_thickness * self.antialias
        if fine != round(fine):
            raise ValueError(
                f"Pathfinder.paddle_thickness must be a multiple of 1/{self.antialias}, whole pixels where it is "
                f"drawn, got {self.paddle_thickness}"
            )

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def length(self) -> int:
        return self.size**2

    def draw(self, draws: Draws) -> Example:
        return raster_row(*self.picture(draws))

    def picture(self, draws: Draws) -> Picture:
        """Draw an image and its label.

        Raises:
          ValueError: the long contours find no room.
        """
        numbers = _stream(draws)
        label, length, margin = (
            values[int(next(numbers) * len(values))] for values in ((0, 1), self.contours, self.margins)
        )
        shapes = make_shapes(
            Paddle(self.paddle_length, self.paddle_thickness, margin, self.antialias), self.continuity
        )
        tries = (
            self._long_contours(Canvas(self.size, self.padding, shapes, numbers), length)
            for _ in range(LONG_TRIES)
        )
        found = next((found for found in tries if found is not None), None)
        if found is None:
            raise ValueError(
                f"Pathfinder found no room for two contours of {length} segments in {LONG_TRIES:,} tries at size = "
                f"{self.size} and continuity = {self.continuity}: draw shorter ones, or lower continuity"
            )
        canvas, long = found
        short = []
        for _ in range(self.short_contours):
            canvas, segments = self._short_contour(canvas)
            short += segments
        first = canvas.below(2)
        marked = (long[first][0], long[first if label else 1 - first][-1])
        bright = [(segment, self.contrast) for segment in (*long[0], *long[1])]
        bright += [(segment, self.short_contrast) for segment in short]
        return Picture(self._image(shapes, bright, marked), label)

    def _long_contours(self, canvas: Canvas, length: int) -> tuple[Canvas, list[list[Segment]]] | None:
        """Let two contours grow in turn; None where one has no room."""
        first = self._first_segments(canvas)
        both = [Contour(canvas, segment) for segment in first]
        if not first or not all(contour.extend() for _ in range(length - 1) for contour in both):
            return None
        # Leave the first contour's last segment free, as the original does: a short contour may touch it.
        both[1].settle()
        return canvas, [contour.segments for contour in both]

    def _first_segments(self, canvas: Canvas) -> list[Segment]:
        """Draw where the contours begin, and in which directions; nothing where the first one does not fit."""
        starts = canvas.shapes.starts
        direction = starts[canvas.below(len(starts))]
        free = canvas.free_places(direction, 2 * self.seed_distance)
        if not len(free):
            return []
        y, x = divmod(int(free[canvas.below(len(free))]), self.size)
        other, angle = canvas.below(DEGREES), math.radians(canvas.below(DEGREES))
        dy, dx = self.seed_distance * math.sin(angle), self.seed_distance * math.cos(angle)
        return [Segment(y, x, direction), Segment(round(y + dy), round(x + dx), other)]

    def _short_contour(self, canvas: Canvas) -> tuple[Canvas, list[Segment]]:
        """Return a canvas with one more contour, and its segments; the same and none where it finds no place."""
        for _ in range(SHORT_TRIES):
            direction = canvas.below(DEGREES)
            free = canvas.free_places(direction, 1)
            if not len(free) or canvas.is_full():
                continue
            trial = canvas.copy()
            place = divmod(int(free[canvas.below(len(free))]), self.size)
            contour = Contour(trial, Segment(*place, direction))
            if contour.grow(self.short_contour - 1):
                contour.settle()
                return trial, contour.segments
        return canvas, []

    def _image(
        self, shapes: Shapes, bright: list[tuple[Segment, float]], marked: tuple[Segment, Segment]
    ) -> np.ndarray:
        """Draw segments and two discs, each as bright as its brightest shape, and stretch the image to bytes."""
        marker = _marker(self.marker_radius, self.antialias)
        stamps = [(s.y, s.x, contrast * shapes.lines[s.direction]) for s, contrast in bright]
        stamps += [(s.y, s.x, marker) for s in marked]
        room = max(shapes.reach, len(marker) // 2)
        image = np.zeros((self.size + 2 * room,) * 2)
        for y, x, stamp in stamps:
            low, side = room - len(stamp) // 2, len(stamp)
            here = image[y + low : y + low + side, x + low : x + low + side]
            np.maximum(here, stamp, out=here)
        image = image[room:-room, room:-room]
        low, high = image.min(), image.max()
        return ((image - low) * (255 / (high - low)) + 0.5).astype(np.uint8)


_marker = lru_cache(maxsize=16)(disc)


def _stream(draws: Draws) -> Iterator[float]:
    while True:
        yield from draws.uniform(256).tolist()
