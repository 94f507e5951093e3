"""The parts that Pathfinder's images are stamped from: short thick lines, their margins, and discs.

Each is drawn `antialias` times finer and reduced with Lanczos' filter in steps of 1/255, as Pillow reduces it.
"""

import math
from typing import NamedTuple

import numpy as np

Offsets = np.ndarray
"""Int64[..., 2]: rows and columns."""


class Paddle(NamedTuple):
    """The shape of a segment, which its authors call a paddle.

    Attributes:
      length: from end to end, in pixels.
      thickness: in pixels.
      margin: pixels round it that no other segment enters.
      antialias: how many times finer it is drawn.
    """

    length: int
    thickness: float
    margin: int
    antialias: int

    @property
    def reach(self) -> int:
        """Pixels of a stamp on either side of its centre."""
        return self.length + math.ceil(self.thickness) + self.margin


def lanczos(given: int, wanted: int) -> np.ndarray:
    """Return Float64[wanted, given], the weights of Lanczos' filter with three lobes."""
    scale = given / wanted
    centre = (np.arange(wanted)[:, None] + 0.5) * scale
    support = 3 * scale
    x = np.arange(given)[None]
    first, last = np.floor(centre - support + 0.5), np.floor(centre + support + 0.5)
    distance = (x + 0.5 - centre) / scale
    weights = np.where((x >= first) & (x < last), np.sinc(distance) * np.sinc(distance / 3), 0.0)
    return weights / weights.sum(1, keepdims=True)


def reduce(drawn: np.ndarray, size: int) -> np.ndarray:
    """Return a square Bool[n, n] drawing at `size` pixels, Float64, whole numbers up to 255: columns, then rows."""
    weights = lanczos(len(drawn), size)
    columns = _whole(255.0 * drawn @ weights.T)
    return _whole(weights @ columns)


def _whole(x: np.ndarray) -> np.ndarray:
    return np.clip(np.floor(x + 0.5), 0, 255)


def turned(degrees: np.ndarray, distance: float) -> Offsets:
    """Return the offset of a point that lies so far away in a direction, in whole pixels, rounded up.

    Rounding to nine places first keeps a sine that should be 0 from becoming a pixel.
    """
    radians = np.deg2rad(degrees)
    exact = distance * np.stack([np.sin(radians), np.cos(radians)], -1)
    return np.ceil(np.round(exact, 9)).astype(np.int64)


def draw_line(paddle: Paddle, degrees: float) -> np.ndarray:
    """Return Bool[n, n], a finely drawn line from the centre in a direction."""
    fine = paddle.antialias
    centre = paddle.reach * fine
    end = turned(np.array(degrees), paddle.length * fine)
    shape = (2 * centre + 1, 2 * centre + 1)
    width = round(paddle.thickness * fine)
    return _thin(shape, centre, end) if width == 1 else _fill(shape, _corners(end, width) + centre)


def _thin(shape: tuple[int, int], centre: int, end: Offsets) -> np.ndarray:
    """Draw one pixel for each step along the longer axis."""
    long = int(np.argmax(np.abs(end)))
    steps = np.arange(abs(end[long]) + 1)
    place = np.empty((len(steps), 2), np.int64)
    place[:, long] = centre + np.sign(end[long]) * steps
    rise = np.floor(abs(end[1 - long] / end[long]) * steps + 0.5).astype(np.int64)
    place[:, 1 - long] = centre + np.sign(end[1 - long]) * rise
    drawn = np.zeros(shape, bool)
    drawn[place[:, 0], place[:, 1]] = True
    return drawn


def _corners(end: Offsets, width: int) -> Offsets:
    """Return the corners of a line from 0 to `end`; of an even width one side is a pixel wider."""
    more, less = (nearest((width - 1) / 2) / math.hypot(*end) for nearest in (_half_up, _half_down))
    dy, dx = end
    below = np.array([_half_up(more * dx), -_half_down(less * dy)])
    above = np.array([-_half_up(less * dx), _half_down(more * dy)])
    return np.stack([below, end + below, end + above, above])


def _half_up(x: float) -> int:
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def _half_down(x: float) -> int:
    return int(math.copysign(math.ceil(abs(x) - 0.5), x))


def _fill(shape: tuple[int, int], corners: Offsets) -> np.ndarray:
    """Fill a convex polygon row by row, from the nearest column of its left edge to that of its right edge."""
    drawn = np.zeros(shape, bool)
    edges = [(corners[i], corners[(i + 1) % len(corners)]) for i in range(len(corners))]
    for row in range(corners[:, 0].min(), corners[:, 0].max() + 1):
        crossed: list[float] = []
        for (y0, x0), (y1, x1) in edges:
            if y0 == y1 == row:
                crossed += [x0, x1]
            elif y0 != y1 and min(y0, y1) <= row <= max(y0, y1):
                crossed.append(x0 + (row - y0) * (x1 - x0) / (y1 - y0))
        drawn[row, math.floor(min(crossed) + 0.5) : math.ceil(max(crossed) - 0.5) + 1] = True
    return drawn


def widen(drawn: np.ndarray, radius: float) -> np.ndarray:
    """Return Bool of a drawing's shape: what lies within `radius` of what is drawn."""
    y, x = np.indices(drawn.shape)
    found = np.zeros(drawn.shape, bool)
    for row, column in np.argwhere(drawn):
        found |= (y - row) ** 2 + (x - column) ** 2 <= radius**2
    return found


def spread(values: np.ndarray, radius: int) -> np.ndarray:
    """Return [n + 2 r, n + 2 r] of [n, n] values: the largest within `radius` of each place."""
    size, side = len(values), len(values) + 2 * radius
    found = np.zeros((side, side), values.dtype)
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if dy * dy + dx * dx <= radius * radius:
                here = found[radius + dy : radius + dy + size, radius + dx : radius + dx + size]
                np.maximum(here, values, out=here)
    return found


def disc(radius: float, antialias: int) -> np.ndarray:
    """Return Float64[n, n] in 0..1, a marker round the middle pixel."""
    reach = math.ceil(radius) + 4  # beyond the filter's lobes
    y, x = np.indices((antialias * (2 * reach + 1),) * 2) - reach * antialias
    return reduce(y * y + x * x <= (radius * antialias) ** 2, 2 * reach + 1) / 255
