"""Dashed contours that grow segment by segment and keep clear of each other, as in Pathfinder's original program.

A contour is a chain of paddles. Between two of them lies a pivot, an invisible point one margin away from either. The
next paddle ends on a circle round its pivot, more often straight ahead than aside.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from jaxblt.data.tasks.pixels.stamps import Offsets, Paddle, draw_line, reduce, spread, turned, widen

WHOLE = 255
"""A whole pixel: parts of one are counted in such steps."""
FREE = int(0.3 * WHOLE)
"""The most of a pixel that may be taken where a contour begins."""
CROWDED = int(1.8 * WHOLE)
"""The parts of one pixel, taken by a segment and by those before it, at which they cross."""
LEAST_FREE = 0.01
"""The share of an image's pixels that are free where another contour begins."""
LEAST_CHANCE = 1e-4
"""The chances of all places for a next segment, added up, where it has one."""
TRIES = 3
"""Draws of one segment."""
DEGREES = 360
"""Directions of a first segment, -180..179 degrees; a later one is numbered from here by its place on the circle."""


class Segment(NamedTuple):
    """A segment, which begins at a pixel and runs in a direction."""

    y: int
    x: int
    direction: int


class Shapes(NamedTuple):
    """All that depends on the paddle alone; lists count directions, S is the side of a stamp.

    Attributes:
      reach: pixels of a stamp on either side of its centre.
      lines: Float64[directions, S, S], how bright a segment is.
      taken: UInt16[directions, S, S], how much of a pixel it takes, its margin included.
      near: UInt16[directions, S + 2 margin, S + 2 margin], how much is taken within a margin of a pixel.
      strides: from a pivot to the next, rows and columns.
      heads: where the next segment may begin, as seen from its pivot, and its direction. It runs back to the pivot.
      chances: of each of these, if nothing is in the way.
      first_pivots: from the end that a contour begins with.
      bodies: pixels that a first segment takes whole, from its end.
      starts: directions that a first segment may have.
    """

    reach: int
    lines: np.ndarray
    taken: np.ndarray
    near: np.ndarray
    strides: list[list[int]]
    heads: list[list[Segment]]
    chances: list[list[float]]
    first_pivots: list[list[int]]
    bodies: tuple[Offsets, ...]
    starts: tuple[int, ...]


@lru_cache(maxsize=16)
def make_shapes(paddle: Paddle, continuity: float) -> Shapes:
    """Make the stamps and tables of a paddle."""
    length, margin = paddle.length, paddle.margin
    circle = _circle(length + margin)
    first, later = np.arange(-180.0, 180.0), np.rad2deg(np.arctan2(circle[:, 0], circle[:, 1]))
    degrees = np.concatenate([first, later])
    drawn = [draw_line(paddle, angle) for angle in np.concatenate([first, later + 180])]
    heads = [Segment(int(y), int(x), DEGREES + number) for number, (y, x) in enumerate(circle)]
    apart = np.abs(degrees[:, None] - later)
    turn = np.deg2rad(np.minimum(apart, 360 - apart))
    chances = np.cos(np.minimum(continuity * turn, math.pi / 2)) ** 2
    possible = [np.flatnonzero(row > 1e-9) for row in chances]
    side = 2 * paddle.reach + 1
    taken = [reduce(widen(line, margin * paddle.antialias), side).astype(np.uint16) for line in drawn]
    bodies = tuple(_body(part, length + margin) for part in taken[:DEGREES])
    return Shapes(
        reach=paddle.reach,
        lines=np.stack([reduce(line, side) for line in drawn]) / WHOLE,
        taken=np.stack(taken),
        near=np.stack([spread(part, margin) for part in taken]),
        strides=turned(degrees, length + 2 * margin).tolist(),
        heads=[[heads[i] for i in row] for row in possible],
        chances=[chances[i, row].tolist() for i, row in enumerate(possible)],
        first_pivots=(turned(first, length) + turned(first + 180, length + margin)).tolist(),
        bodies=bodies,
        starts=tuple(direction for direction, body in enumerate(bodies) if _is_start(body)),
    )


def _circle(radius: int) -> Offsets:
    """Return the different pixels on a circle: a point about every pixel, rounded down."""
    radians = np.deg2rad(np.arange(0, 360, 360 / (2 * math.pi * radius)))
    points = radius * np.stack([np.sin(radians), np.cos(radians)], -1)
    return np.unique(np.floor(np.round(points, 9)).astype(np.int64), axis=0)


def _body(taken: np.ndarray, reach: int) -> Offsets:
    """Return the pixels that are taken whole, within `reach`; one further down and right, as the original has them."""
    found = np.argwhere(taken == WHOLE) - len(taken) // 2 + 1
    return found[np.abs(found).max(1) <= reach]


def _is_start(body: Offsets) -> bool:
    """Return whether a first segment's body, put on any pixel, holds a pixel of the image.

    Otherwise the original program compares with minus infinity at a corner, and takes the image to be full. So thin
    segments begin up and to the left, and most images of 32 x 32 pixels have one short contour where five are tried.
    """
    quadrants = [(sy * body[:, 0] >= 0) & (sx * body[:, 1] >= 0) for sy in (-1, 1) for sx in (-1, 1)]
    return all(quadrant.any() for quadrant in quadrants)


class Canvas:
    """What contours have taken of an image, with room for stamps beyond its edges.

    Args:
      size: of the image's side.
      padding: pixels at each edge that no contour enters.
      shapes: of the contours.
      numbers: uniform in [0, 1), without end.
    """

    def __init__(self, size: int, padding: int, shapes: Shapes, numbers: Iterator[float]) -> None:
        self.size, self.shapes, self.numbers = size, shapes, numbers
        self.room = room = shapes.near.shape[1] // 2
        side, margin = size + 2 * room, room - shapes.reach
        taken = np.zeros((side, side), np.uint16)
        taken[room : room + size, room : room + size] = WHOLE
        taken[room + padding : room + size - padding, room + padding : room + size - padding] = 0
        # Take everything outside, so that no segment ends there.
        near = np.full((side, side), WHOLE, np.uint16)
        inside = slice(room + padding + margin, room + size - padding - margin)
        near[inside, inside] = 0
        self._hold(taken, near)

    def _hold(self, taken: np.ndarray, near: np.ndarray) -> None:
        self.taken, self.near = taken, near
        # Read single pixels through a view: it takes a fraction of the time that an array takes.
        self.flat_near = memoryview(near.reshape(-1))

    def copy(self) -> "Canvas":
        """Return a canvas to draw on that leaves this one as it is."""
        other = object.__new__(Canvas)
        other.size, other.shapes, other.numbers, other.room = self.size, self.shapes, self.numbers, self.room
        other._hold(self.taken.copy(), self.near.copy())
        return other

    def below(self, limit: int) -> int:
        """Draw a whole number in 0..limit - 1."""
        return int(next(self.numbers) * limit)

    def crosses(self, segment: Segment) -> bool:
        """Return whether a segment would take what is taken."""
        y, x, direction = segment
        low, side = self.room - self.shapes.reach, 2 * self.shapes.reach + 1
        here = self.taken[y + low : y + low + side, x + low : x + low + side]
        return int((here + self.shapes.taken[direction]).max()) >= CROWDED

    def take(self, segment: Segment) -> None:
        """Keep later segments away from a segment."""
        (y, x, direction), shapes = segment, self.shapes
        low, side = self.room - shapes.reach, 2 * shapes.reach + 1
        here = self.taken[y + low : y + low + side, x + low : x + low + side]
        np.maximum(here, shapes.taken[direction], out=here)
        here = self.near[y : y + 2 * self.room + 1, x : x + 2 * self.room + 1]
        np.maximum(here, shapes.near[direction], out=here)

    def free_places(self, direction: int, border: int) -> np.ndarray:
        """Return Int64[N], y size + x of the places where a first segment fits, `border` away from all edges.

        There is none in directions that are no start.
        """
        if direction not in self.shapes.starts:
            return np.zeros(0, np.int64)
        room, size = self.room, self.size
        crowded = self.taken > FREE
        low, high = room + border, room + size - border
        crowded[:low] = crowded[high:] = crowded[:, :low] = crowded[:, high:] = True
        blocked = np.zeros((size, size), bool)
        for dy, dx in self.shapes.bodies[direction]:
            blocked |= crowded[room + dy : room + dy + size, room + dx : room + dx + size]
        return np.flatnonzero(~blocked)

    def is_full(self) -> bool:
        """Return whether too few pixels are free to begin another contour."""
        room, size = self.room, self.size
        free = self.taken[room : room + size, room : room + size] <= FREE
        return int(np.count_nonzero(free)) < LEAST_FREE * size * size


class Contour:
    """A contour that grows on a canvas.

    Attributes:
      segments: in order; the first one's place is an end of the contour, and the last one's is the other end.
    """

    def __init__(self, canvas: Canvas, first: Segment) -> None:
        self.canvas, self.segments = canvas, [first]
        dy, dx = canvas.shapes.first_pivots[first.direction]
        self.pivot = first.y + dy, first.x + dx

    def grow(self, segments: int) -> bool:
        """Add segments; False where there is no room for one."""
        return all(self.extend() for _ in range(segments))

    def extend(self) -> bool:
        """Add a segment, unless there is no room for one.

        The segment before it takes its place only now: it touches the new one's margin.
        """
        canvas, shapes = self.canvas, self.canvas.shapes
        direction = self.segments[-1].direction
        dy, dx = shapes.strides[direction]
        py, px = self.pivot[0] + dy, self.pivot[1] + dx
        near, width = canvas.flat_near, len(canvas.near)
        start = (py + canvas.room) * width + px + canvas.room
        heads = shapes.heads[direction]
        free = [WHOLE - near[start + y * width + x] for y, x, _ in heads]
        reached = list(accumulate(map(mul, shapes.chances[direction], free)))
        if reached[-1] < LEAST_CHANCE * WHOLE:
            return False
        for _ in range(TRIES):
            y, x, later = heads[bisect_right(reached, next(canvas.numbers) * reached[-1])]
            segment = Segment(py + y, px + x, later)
            if not canvas.crosses(segment):
                self.settle()
                self.segments.append(segment)
                self.pivot = py, px
                return True
        return False

    def settle(self) -> None:
        """Keep other contours away from the last segment."""
        self.canvas.take(self.segments[-1])
