"""The sizes of `evo2`, its parts, and a call that is timed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxblt.validation import check_bounds, check_fields

Side = Literal["theirs", "ours"]
Part = Literal["forward", "long", "write", "write_long", "write_rows", "adapters", "substitutions", "split"]
PARTS: tuple[Part, ...] = (
    "forward",
    "long",
    "write",
    "write_long",
    "write_rows",
    "adapters",
    "substitutions",
)
"""Those that one GPU runs in minutes."""


@dataclass(frozen=True)
class Setting:
    """The sizes of the parts.

    Attributes:
      forward: (rows, bytes) of `forward`.
      long: bytes of the row of `long`, and behind which `write_long` writes.
      split: bytes of the row of `split`.
      short: bytes behind which `write` and `write_rows` write.
      rows: of `write_rows`.
      new_bytes: written by a call.
      adapters: (rows, bytes) of the train step of adapters.
      rank: of adapters of all products.
      remat: what a block of that step keeps for its backward pass.
      mutants: read together behind a shared prefix.
      piece: bytes of a mutant that are read at once.
      checked: bytes of the row whose logits the two sides compare.
      trials: of each timing.
      seconds: after which a timing ends with the trials that it has.
      kernels: the peer's Triton kernels are on.
    """

    forward: tuple[int, int] = (8, 8192)
    long: int = 131_072
    split: int = 1_048_576
    short: int = 8192
    rows: int = 64
    new_bytes: int = 64
    adapters: tuple[int, int] = (4, 8192)
    rank: int = 16
    remat: Literal["none", "full", "dots"] = "full"
    mutants: int = 64
    piece: int = 1024
    checked: int = 1024
    trials: int = 5
    seconds: float = 8.0
    kernels: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        whole = ("forward", "long", "split", "short", "rows", "new_bytes", "adapters", "rank")
        check_bounds(self, *whole, "mutants", "piece", "checked", "trials", least=1)
        check_bounds(self, "seconds", above=0)
        if self.forward[1] % self.piece:
            raise ValueError(
                f"Setting.piece = {self.piece} must divide the {self.forward[1]} bytes of Setting.forward: mutants are "
                "read in whole pieces"
            )


class Timed(NamedTuple):
    """A call that was prepared.

    Attributes:
      call: runs it and waits for it.
      figures: what is known of it besides; a function is called behind the last trial.
    """

    call: Callable[[], Any]
    figures: dict[str, Any]
