"""The inputs that properties are tried on."""

import dataclasses
import inspect
from collections.abc import Iterator

import numpy as np

from jaxblt.testing.conformance.properties import Property


@dataclasses.dataclass(frozen=True)
class Case:
    """The size of an input, and where a property cuts it; None if it does not."""

    rows: int
    length: int
    width: int
    cut: int | None

    def inputs(self) -> np.ndarray:
        """Return x, of numbers that bf16 holds exactly."""
        shape = (self.rows, self.length, self.width)
        return np.round(16 * np.random.default_rng(0).standard_normal(shape)).astype("float32") / 16

    def source(self) -> str:
        """Return the expression of `inputs`."""
        shape = (self.rows, self.length, self.width)
        return f'np.round(16 * np.random.default_rng(0).standard_normal({shape})).astype("float32") / 16'


def cases(prop: Property, length: int, width: int) -> Iterator[Case]:
    """Yield the cases of a length, those with a small cut first."""
    if "cut" not in inspect.signature(prop.check).parameters:
        yield Case(prop.rows, length, width, None)
        return
    for cut in sorted({1, length // 2, length - 1} & set(range(1, length))):
        yield Case(prop.rows, length, width, cut)
