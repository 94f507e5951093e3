"""A layer under test: how it is called, and what it promises."""

import dataclasses
from collections.abc import Callable, Collection
from importlib import metadata
from typing import Any, Literal

import jax
import numpy as np

from jaxblt.training.stored.safe_files import one_line

PROMISES: dict[str, str] = {
    "causal": "a token's output depends on tokens up to its own",
    "lengths": "rows may have any length",
    "batch": "rows do not depend on each other",
    "documents": "a row may hold several documents",
    "padding": "tokens of document 0 behind a row's own are not read",
    "left_padding": "tokens of document 0 before a row's own are not read",
    "nan": "what lies at padding is not read even if it is NaN",
    "state": "a row may be read as a first part, then token by token",
    "any_split": "a row may be read in calls of any sizes",
    "pure_state": "a call leaves the state that it was given as it was",
    "steady_state": "shapes and dtypes of the state stay",
    "documents_in_calls": "a document may begin at any call",
    "decays": "decays may be as small as exp(-30)",
    "gradients": "the layer has a gradient by its inputs",
    "dtype": "outputs have the dtype of the inputs",
    "values": "outputs are those of the layer's reference",
}
"""What a layer can promise."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a bridge makes.

    Attributes:
      call: (x, documents=None, state=None) -> (y, state). It takes x [B, T, D] as a NumPy array or as an array of its
        framework, and returns y of its framework, [B, T, ...]. `documents` is an int array [B, T] of NumPy: 0 is
        padding. It needs those of the two options that the layer promises something of.
      start: rows -> the state before the first token; None if that is None.
      reference: x in f64 -> y, computed in f64; None if there is none.
    """

    call: Callable[..., tuple[Any, Any]]
    start: Callable[[int], Any] | None = None
    reference: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A layer, what it promises, and how to make it.

    Attributes:
      name: of the layer.
      make: imports what it needs, and returns a Layer. Its lines, without the last, begin the scripts of findings. Or
        those lines as text, which define `call` and, if there are any, `start` and `reference`.
      width: size of the last axis of x.
      promises: names of `PROMISES`.
      dtype: of inputs and products; sets the tolerance.
      decays: the columns of x in which 30 makes the decay at most exp(-30); for "decays".
      lengths: of the rows that are tried, smallest first.
      peer: the distribution that the layer comes from, whose version is recorded.
      called: how its documentation says that it is called.
      gpu: the layer runs on a GPU only.

    Raises:
      ValueError: it promises nothing, or something that is not in `PROMISES`, or lacks what a promise needs.
    """

    name: str
    make: Callable[[], Layer] | str
    width: int
    promises: Collection[str]
    dtype: Literal["float32", "bfloat16"] = "float32"
    decays: slice | None = None
    lengths: tuple[int, ...] = (1, 2, 3, 8, 17, 65, 130)
    peer: str | None = None
    called: str = ""
    gpu: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(PROMISES)
        if not self.promises:
            raise ValueError(f"subject {self.name!r} promises nothing, expected some of: {known}")
        if unknown := sorted(set(self.promises) - set(PROMISES)):
            raise ValueError(
                f"subject {self.name!r} promises {', '.join(unknown)}, expected some of: {known}"
            )
        if "decays" in self.promises and self.decays is None:
            raise ValueError(
                f"subject {self.name!r} promises decays: say in which columns, as decays=slice(...)"
            )

    @property
    def version(self) -> str | None:
        """The installed version of the peer."""
        return None if self.peer is None else metadata.version(self.peer)

    def build(self) -> Layer:
        """Make the layer.

        Raises:
          RuntimeError: it needs a GPU, and there is none.
          ImportError: its package is not installed.
          ValueError: it promises "values" and has no reference.
        """
        if self.gpu and jax.default_backend() != "gpu":
            raise RuntimeError(
                f"subject {self.name!r} needs a GPU, and JAX finds none: run it where there is one"
            )
        try:
            layer = _made_of(self.make) if isinstance(self.make, str) else self.make()
        except ImportError as error:
            needs = self.peer or error.name
            raise ImportError(
                f"subject {self.name!r} needs {needs}, which is not installed here ({one_line(error)})"
            ) from error
        if "values" in self.promises and layer.reference is None:
            raise ValueError(f"subject {self.name!r} promises values: give its Layer a reference")
        return layer


def _made_of(lines: str) -> Layer:
    """Return the layer that lines of Python define."""
    names: dict[str, Any] = {"np": np}
    exec(compile(lines, "bridge", "exec"), names)
    return Layer(names["call"], names.get("start"), names.get("reference"))
