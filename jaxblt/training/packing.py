"""How documents lie in a recipe's rows: derived from its data, for the packer, the model and the step alike.

Rows of "windows" and "buckets" hold one document each. Mixers are promised as much, which lets their fastest kernels
run. Rows of "first_fit" and "sequential" hold several documents, which start at multiples of `data.alignment`. A
patcher raises that to a multiple of its block, so that no block holds two documents. A mixer of bytes with a
`training_grid` raises it to a multiple of the grid. Where a mixer of patches has one, the calibrated capacity keeps to
it.
"""

import math
from dataclasses import replace
from typing import Any

from jaxblt.data.config import DataConfig
from jaxblt.data.task_data import RowsConfig
from jaxblt.models.row_layout import PROMISES, RowLayout, off_grid, promise, promises
from jaxblt.patching.config import PatcherConfig

SLOTS_MULTIPLE = 8
"""Of which a calibrated capacity is a multiple, for the kernels' sake."""
ROW_MULTIPLE = 512
"""Slots of which convolutions' kernels take a row as it lies, and several rows at a time."""
HEADROOM = 1.25
"""Slots of a block for each patch that a mean block has; the demo's run calibrated 160 for 128."""
MOST_MORE = 1 / 32
"""Share of a capacity by which it may grow for that."""


def has_several_documents(data: RowsConfig) -> bool:
    """Return whether a row may hold more than one document."""
    return data.packing not in ("windows", "buckets")


def has_full_rows(data: RowsConfig) -> bool:
    """Return whether every training row is one document from end to end, so that the model needs no segment ids."""
    return isinstance(data, DataConfig) and data.packing == "windows" and data.partial == "drop"


def align(model: Any, data: RowsConfig, patcher: PatcherConfig | None) -> RowsConfig:
    """Let packed documents start where a block of the patcher does, or where mixers of bytes need them."""
    if not has_several_documents(data):
        return data
    if patcher is None:
        return replace(data, alignment=data.alignment * off_grid(promise_rows(model, data, None)))
    return replace(data, alignment=math.lcm(data.alignment, patcher.block_size))


def check_alignment(data: RowsConfig, patcher: PatcherConfig | None) -> None:
    """Raise ValueError if packed rows are not a whole number of the units in which documents start."""
    if not has_several_documents(data) or data.seq_len % data.alignment == 0:
        return
    if patcher is None or data.seq_len % patcher.block_size == 0:
        raise ValueError(
            f"data.seq_len = {data.seq_len} is no multiple of data.alignment = {data.alignment}, at multiples of which "
            "documents start: change one of them"
        )
    raise ValueError(
        f"data.packing={data.packing!r} starts documents at multiples of {data.alignment} bytes, where a block begins "
        f"(patcher.block_size = {patcher.block_size}), and data.seq_len = {data.seq_len} is no multiple of that: set "
        f"patcher.block_size to {math.gcd(data.seq_len, patcher.block_size)} or a divisor of it, or use "
        "data.packing='buckets'"
    )


def promise_rows(model: Any, data: RowsConfig, patcher: PatcherConfig | None) -> Any:
    """Tell a model's mixers how documents lie in the rows of `data`, aligned for the patcher.

    A model config may have `in_rows(of_bytes, of_slots)`, two `RowLayout`s: mixers over patches count slots, not
    bytes. Mixers of other models are told how many documents a row has, and nothing of where they start.
    """
    slots = 1 if patcher is None else data.alignment // patcher.block_size * patcher.slots
    return _promise(model, data, slots)


def capacity_multiple(model: Any, data: RowsConfig, patcher: PatcherConfig) -> int:
    """Return what a calibrated capacity is a multiple of: packed documents start where mixers over patches need."""
    return math.lcm(SLOTS_MULTIPLE, off_grid(_promise(model, data, data.alignment // patcher.block_size)))


def mean_slots(model: Any, data: RowsConfig, patcher: PatcherConfig, bytes_per_patch: float) -> int:
    """Return the slots of a block for patches of a mean length: `HEADROOM` times as many as a mean block has."""
    multiple = capacity_multiple(model, data, patcher)
    slots = math.ceil(HEADROOM * patcher.block_size / bytes_per_patch / multiple) * multiple
    return fill_rows(min(slots, patcher.block_size), data, patcher, multiple=multiple)


def fill_rows(slots: int, data: RowsConfig, patcher: PatcherConfig, *, multiple: int) -> int:
    """Raise a calibrated capacity a little if the longest rows then hold a multiple of `ROW_MULTIPLE` slots.

    Modal filters take 2.5 times as long in rows of 2,047 steps as in rows of 2,048, with gradients 2.7 times
    (`modal_conv_2047.json`). Other mixers take as long a slot, and have up to a thirty-second more of them.

    Args:
      slots: the capacity, a multiple of `multiple` or the block's size.
      data: of the recipe.
      patcher: of the recipe.
      multiple: see `capacity_multiple`.
    """
    blocks = -(-data.seq_len // patcher.block_size)
    multiple = math.lcm(multiple, ROW_MULTIPLE // math.gcd(ROW_MULTIPLE, blocks))
    more = -(-slots // multiple) * multiple
    return more if more <= min(slots * (1 + MOST_MORE), patcher.block_size) else slots


def take_back_promises(model: Any, where: str, data: RowsConfig, patcher: PatcherConfig | None) -> Any:
    """Take from `model` what its mixers were promised by hand, once that is found to be true of `data`.

    Args:
      model: config of a model.
      where: its path, to be named in the error.
      data: aligned for the patcher.
      patcher: of the recipe.

    Raises:
      ValueError: a mixer is promised one document a row or an alignment, and the data does not keep it.
    """
    if has_several_documents(data):
        kept = dict(promises(promise_rows(model, data, patcher), where))
        for path, value in promises(model, where):
            _check_promise(path, value, kept[path], data)
    return promise(model, RowLayout())


def forget_promises(stored: Any) -> Any:
    """Take from a recipe's JSON what its mixers were promised, which older versions stored without checking it."""
    if isinstance(stored, list):
        return [forget_promises(item) for item in stored]
    if not isinstance(stored, dict):
        return stored
    return {name: forget_promises(item) for name, item in stored.items() if name not in PROMISES}


def _promise(model: Any, data: RowsConfig, slots: int) -> Any:
    """Promise `model` documents that start at multiples of `slots` in rows of patches."""
    several = has_several_documents(data)
    if not several or not hasattr(model, "in_rows"):
        return promise(model, RowLayout(packed=several))
    return model.in_rows(RowLayout(segment_alignment=data.alignment), RowLayout(segment_alignment=slots))


def _check_promise(path: str, value: Any, kept: Any, data: RowsConfig) -> None:
    if value is False and kept is True:
        raise ValueError(
            f"{path}=False promises one document a row, but data.packing={data.packing!r} puts several in a row: leave "
            "`packed` out, as the data decides it, or use data.packing='buckets' or 'windows'"
        )
    if kept % value:
        raise ValueError(
            f"{path}={value} promises that documents start at multiples of {value}, but with "
            f"data.packing={data.packing!r} and data.alignment={data.alignment} they do at multiples of {kept}: leave "
            "`segment_alignment` out, as it follows data.alignment, or change data.alignment"
        )
