"""The calls that the Triton kernels take, and their tiles; known without importing Triton, which many machines lack."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels._dispatch import Device
from pallas_kernels._jax_triton import why_not_on
from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.chosen import triton_gpu as chosen_blocks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.rules import Interval, Rule, is_static
from pallas_kernels.attention.triton_lists import find_tiles

HEADS = (64, 128)
"""Sizes of a head."""

BLOCKS = (64, 128)
"""Tokens of the smallest and of the largest tile of a row."""


LONG_ROW, LONGEST_WINDOW = 8192, 512
"""Packed rows of so many tokens were timed, under a window of so many before a query, with heads of 64."""


class Tile(NamedTuple):
    """The tile of a kernel: tokens of a program's own side and of the other, its warps, and stages of its loop."""

    rows: int
    columns: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """The tiles of the three kernels."""

    forward: Tile
    queries: Tile
    keys: Tile


SMALL = Kernels(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2))
"""Where a rule's blocks or lengths ask for tiles of 64, and on GPUs other than Hopper."""

LARGE = {
    64: Kernels(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    128: Kernels(Tile(128, 64, 4, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
}
"""On Hopper, by size of a head: ptxas waits for no single product. The forward tile of 128 was the fastest of five,
though that kernel spills 524 bytes in its loop over partial tiles.
"""


@jax.tree_util.register_static
@dataclass(frozen=True)
class Plan:
    """The static side of a call.

    Attributes:
      queries, keys: T and S.
      interval, rule: of the mask.
      scale: of the scores.
      kernels: their tiles.
      runs: for each device that has some of the queries, the numbers of its runs of them, all of one length; () if a
        call has all queries.
    """

    queries: int
    keys: int
    interval: Interval
    rule: Rule | None
    scale: float
    kernels: Kernels
    runs: tuple[tuple[int, ...], ...] = ()

    def grid(self, tile: Tile, *, transposed: bool = False) -> Blocks:
        """Return the pairs of tiles of a kernel; a program of a transposed one owns keys."""
        block_q, block_k = tile[1::-1] if transposed else tile[:2]
        return Blocks(self.queries, self.keys, block_q, block_k, self.interval, by_index=True)

    def rows_of(self, device: int, rows: int) -> np.ndarray:
        """Return which of so many rows of tiles a device has."""
        each = rows // sum(len(runs) for runs in self.runs)
        return np.concatenate([run * each + np.arange(each) for run in self.runs[device]])

    def why_not_listed(self) -> str | None:
        """Return why the pairs of tiles of one of the kernels are too many to list, or None."""
        grids = (
            self.grid(self.kernels.keys, transposed=True),
            self.grid(self.kernels.forward),
            self.grid(self.kernels.queries),
        )
        found = (find_tiles(grid, self.rule) for grid in grids)
        return next((reason for reason in found if isinstance(reason, str)), None)


def make_plan(device: Device, q: Any, k: Any, mask: Mask, scale: float | None) -> Plan:
    """Return the static side of a call that the kernels take."""
    grain = BLOCKS[1] if mask.rule is None or mask.rule.grain is None else mask.rule.grain
    whole = q.shape[1] % BLOCKS[1] == k.shape[1] % BLOCKS[1] == grain % BLOCKS[1] == 0
    return Plan(
        queries=q.shape[1],
        keys=k.shape[1],
        interval=mask.interval,
        rule=mask.rule,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        kernels=LARGE[q.shape[3]] if whole and device.capability == (9, 0) else SMALL,
    )


def why_first(device: Device, q: Any, k: Any, v: Any, mask: Mask, **options: Any) -> str | None:
    """Return why these kernels go before cuDNN's where both can run, or None: long packed rows under a short window."""
    before = mask.interval.before
    windowed = before is not None and before <= LONGEST_WINDOW and mask.segments is not None
    if device.capability != (9, 0) or not windowed or q.shape[3] != 64 or q.shape[1] < LONG_ROW:
        return None
    return (
        None
        if why_not(device, q, k, v, mask, **options)
        else "packed rows under a short window run faster by triton"
    )


def why_not(
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    mask: Mask,
    *,
    alibi_slopes: Any = None,
    scale: Any = None,
    score: Any = None,
) -> str | None:
    """Return why the kernels cannot run this, or None."""
    if (reason := why_not_on(device)) is not None:
        return reason
    if score is not None or alibi_slopes is not None:
        return "it takes no function of scores and no slopes"
    if str(q.dtype) not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16 alone, not {q.dtype}"
    if q.shape[3] not in HEADS:
        return f"its heads are of size {HEADS[0]} or {HEADS[1]}, not {q.shape[3]}"
    if scale is not None and scale <= 0:
        return f"it takes positive scales alone, not {scale}"
    if mask.rule is not None and not is_static(mask.rule):
        return chosen_blocks.why_not(q, k, mask)
    if 0 in (*q.shape, *k.shape) or q.shape[1] % BLOCKS[0] or k.shape[1] % BLOCKS[0]:
        return (
            f"it takes multiples of {BLOCKS[0]} tokens, these are {q.shape[1]} queries and {k.shape[1]} keys"
        )
    if mask.positions is not None:
        return "it lists pairs while a program is traced, and this mask reads positions from arrays"
    return make_plan(device, q, k, mask, scale).why_not_listed()


def why_not_split(
    device: Device, q: Any, k: Any, mask: Mask, runs: tuple[tuple[int, ...], ...]
) -> str | None:
    """Return why the kernels cannot take a device's runs of queries with all keys of a row, or None.

    Args:
      device: that runs the kernels.
      q: queries of one device.
      k: keys of all.
      mask: of whole rows.
      runs: for each device the numbers of its runs of queries, in order.
    """
    if mask.rule is None or not is_static(mask.rule):
        return "it splits static rules alone"
    whole = whole_queries(q, runs)
    if q.shape[1] // len(runs[0]) % BLOCKS[1]:
        return (
            f"each of the runs {runs} has to hold a multiple of {BLOCKS[1]} of the {whole.shape[1]} queries"
        )
    return why_not(device, whole, k, k, mask)


def whole_queries(q: Any, runs: tuple[tuple[int, ...], ...]) -> jax.ShapeDtypeStruct:
    """Return the shape of the queries of all devices."""
    length = q.shape[1] // len(runs[0]) * sum(len(each) for each in runs)
    return jax.ShapeDtypeStruct((q.shape[0], length, *q.shape[2:]), q.dtype)
