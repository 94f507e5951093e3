"""Images with labels, read from arrays: CIFAR-10 in grey ("Image" of Long Range Arena), or Pathfinder's drawn ones."""

import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.permutation import permute
from jaxblt.data.sources.files import expand
from jaxblt.data.splits import SplitName
from jaxblt.data.tasks.loaded import check_any, check_part
from jaxblt.data.tasks.pixels.raster import MOST_SIDE, raster_row
from jaxblt.data.tasks.reviews import VALIDATION_SHARE
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.show import show
from jaxblt.validation import MOST_SEED, check_bounds, check_fields, check_read

Symmetries = Literal["none", "mirror", "square"]
MOST_VIEWS = 4096


@dataclass(frozen=True, kw_only=True)
class PixelClasses:
    """The bytes of an image, from left to right and from top to bottom, and its class behind the last one.

    Reads `train_x.npy`, UInt8[images, side, side] of grey levels, and `train_y.npy`, UInt8[images] of classes; the same
    of `test` and, if they are there, of `validation`. Each may end in `.npy.xz`. Without files for validation, a
    tenth of the training images is. All lie in memory.

    Attributes:
      path: the folder of the arrays.
      side: rows and columns of an image.
      classes: how many there are.
      views: of each training image in an epoch. The first is the image; others are moved and turned at random.
      shift: pixels that a view is moved at the most, each way; black comes in.
      symmetries: "mirror" swaps left and right in half of the views; "square" turns and mirrors them in all eight ways.
      split_seed: picks the images for validation.
    """

    path: str
    side: int = 32
    classes: int = 10
    views: int = 1
    shift: int = 0
    symmetries: Symmetries = "none"
    split_seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "side", least=1, most=MOST_SIDE)
        check_bounds(self, "classes", least=2, most=256)
        check_bounds(self, "views", least=1, most=MOST_VIEWS)
        check_bounds(self, "shift", least=0, most=self.side - 1)
        check_bounds(self, "split_seed", least=0, most=MOST_SEED)
        for name in ("shift", "symmetries"):
            check_read(self, name, needed="views above 1", is_read=self.views > 1)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    @property
    def num_answers(self) -> int:
        """One for each class."""
        return self.classes

    @property
    def length(self) -> int:
        return self.side**2

    def open(self, split: SplitName, *, seed: int = 0) -> "Images":
        """Open the images of a split.

        Raises:
          FileNotFoundError: an array is not there.
          ValueError: an array is there twice, has another shape or type, or a class beyond `classes`; or there is no
            image.
        """
        check_part(split)
        is_held_out = split != "test" and not self._files("validation_x")
        pixels, labels = self._read("train" if is_held_out else split)
        if is_held_out:
            count = len(labels)
            first = count - int(VALIDATION_SHARE * count)
            places = range(first, count) if split == "validation" else range(first)
            order = np.array([permute(place, count, self.split_seed) for place in places], np.int64)
            pixels, labels = pixels[order], labels[order]
        check_any(labels, split, self.path, "add images to its arrays")
        views = self.views if split == "train" else 1
        return Images(pixels, labels, views, self.shift, self.symmetries, seed)

    def _files(self, name: str) -> list[Path]:
        return [
            file
            for end in (".npy", ".npy.xz")
            if (file := Path(self.path).expanduser() / (name + end)).exists()
        ]

    def _array(self, name: str) -> np.ndarray:
        files = self._files(name) or expand(Path(self.path) / f"{name}.npy")
        if len(files) > 1:
            raise ValueError(f"{self.path!r} holds {name}.npy {len(files)} times: leave one of {files}")
        try:
            with (lzma.open if files[0].suffix == ".xz" else open)(files[0], "rb") as file:
                return np.load(file, allow_pickle=False)
        except (ValueError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"{str(files[0])!r} is no array ({error}): write it with numpy.save") from error

    def _read(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = self._array(f"{part}_x"), self._array(f"{part}_y")
        expected = (len(labels), self.side, self.side)
        if pixels.dtype != np.uint8 or labels.dtype != np.uint8 or pixels.shape != expected:
            raise ValueError(
                f"{self.path!r} holds {part}_x of {pixels.dtype}{list(pixels.shape)} and {part}_y of "
                f"{labels.dtype}{list(labels.shape)}, expected uint8{list(expected)} and uint8: set data.task.side"
            )
        if len(labels) and labels.max() >= self.classes:
            raise ValueError(
                f"{self.path!r}: {part}_y has class {labels.max()}, expected below {self.classes}: set "
                "data.task.classes"
            )
        return pixels, labels


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one split, in several views each.

    Attributes:
      pixels: UInt8[N, side, side].
      labels: UInt8[N].
      views, shift, symmetries: as of `PixelClasses`.
      seed: picks the views.
      groups, group_names: there are no subtasks.
    """

    pixels: np.ndarray
    labels: np.ndarray
    views: int
    shift: int
    symmetries: Symmetries
    seed: int

    groups = None
    group_names = ()

    __repr__ = show

    @property
    def count(self) -> int:
        return len(self.labels) * self.views

    @property
    def lengths(self) -> np.ndarray:
        """Int64[N views], positions of each."""
        return np.full(self.count, self.pixels[0].size, np.int64)

    def example(self, number: int) -> Example:
        if not 0 <= number < self.count:
            raise IndexError(f"example {number} does not exist: there are {self.count}")
        view, place = divmod(number, len(self.labels))
        pixels = self.pixels[place]
        if view:
            pixels = change(pixels, Draws(self.seed, number), self.shift, self.symmetries)
        return raster_row(pixels, int(self.labels[place]))


def change(pixels: np.ndarray, draws: Draws, shift: int, symmetries: Symmetries) -> np.ndarray:
    """Move an image by at most `shift` pixels each way, and turn or mirror it, at random."""
    dy, dx, way = draws.words(3).tolist()
    if shift:
        side, span = len(pixels), 2 * shift + 1
        wide = np.pad(pixels, shift)
        pixels = wide[dy % span : dy % span + side, dx % span : dx % span + side]
    if symmetries == "square":
        pixels = np.rot90(pixels, way // 2 % 4)
    if symmetries != "none" and way % 2:
        pixels = pixels[:, ::-1]
    return pixels
