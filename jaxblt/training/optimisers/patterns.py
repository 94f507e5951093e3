"""Parameters chosen by patterns of their names, and how deep in a model each of them lies.

A parameter is named by its path, such as "stack/periods/block_0/mlp/up/kernel". Patterns are those of file names: `*`
stands for any characters, slashes too.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxblt.models.hidden import FINAL
from jaxblt.models.labeller import HEAD
from jaxblt.models.stack import StackConfig

TOP = (FINAL[0], HEAD)
"""Submodules above all stacks."""


def matching(patterns: Sequence[str], names: Collection[str], option: str) -> set[str]:
    """Return the names that any of the patterns matches.

    Raises:
      ValueError: a pattern matches none; names the pattern and the nearest names.
    """
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if fnmatchcase(name, pattern)}
        if not hits:
            near = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.0)
            raise ValueError(
                f"{option} = {pattern!r} matches none of {len(names)} parameters; the nearest are {', '.join(near)}"
            )
        found |= hits
    return found


def without(params: Any, patterns: Sequence[str]) -> Any:
    """Drop from a tree (of arrays, shapes or boxes) the parameters that the patterns freeze.

    Raises:
      ValueError: a pattern matches nothing, or together they leave nothing to train.
    """
    if not patterns:
        return params
    flat = flatten_dict(params, sep="/")
    still = matching(patterns, flat.keys(), "freeze")
    if len(still) == len(flat):
        raise ValueError(
            f"freeze = {tuple(patterns)} matches every parameter, so that none is trained: leave one out"
        )
    return unflatten_dict({name: leaf for name, leaf in flat.items() if name not in still}, sep="/")


def depth_scales(boxed: Any, stacks: Mapping[str, StackConfig], decay: float) -> Any:
    """Return decay^(L + 1 - d) for each parameter at depth d of L blocks (Howard and Ruder, 1801.06146, sec. 3.2).

    Blocks count from 1 at the bottom, stack after stack. Heads are at L + 1. What lies in no stack (embeddings,
    positions, the bridges of a BLT) is at 0. A parameter of scanned blocks has a factor for each period of the pattern.

    Args:
      boxed: the parameters or their shapes, with logical axis names.
      stacks: of the model, in the order in which bytes pass them.
      decay: factor from a block to the one below.
    """
    firsts, total = {}, 0
    for name, stack in stacks.items():
        firsts[name] = total
        total += stack.num_layers

    def scale(path: tuple[str, ...], leaf: Any) -> np.ndarray:
        depth = np.float32(total + 1 if path[0] in TOP else 0)
        if path[0] in stacks and len(path) > 2:
            depth = firsts[path[0]] + _blocks(stacks[path[0]], path[1], path[2])
        factor = np.asarray(decay ** (total + 1 - depth), np.float32)
        rank = len(getattr(leaf, "names", ())) or leaf.ndim
        return factor.reshape(factor.shape + (1,) * (rank - factor.ndim)) if factor.ndim else factor

    return unflatten_dict({path: scale(path, leaf) for path, leaf in flatten_dict(boxed).items()})


def rate_scales(boxed: Any, rates: Sequence[tuple[str, float]]) -> Any:
    """Return the product of the factors whose patterns match, for each parameter.

    Args:
      boxed: the parameters or their shapes.
      rates: (pattern, factor) pairs.

    Raises:
      ValueError: a pattern matches nothing.
    """
    flat = flatten_dict(boxed, sep="/")
    scales = dict.fromkeys(flat, np.float32(1))
    for pattern, factor in rates:
        for name in matching([pattern], flat.keys(), "rates"):
            scales[name] *= np.float32(factor)
    return unflatten_dict(scales, sep="/")


def _blocks(stack: StackConfig, part: str, block: str) -> Any:
    """Return the number, from 1, of a stack's block, or Float[periods] of the blocks that are scanned; see `Stack`."""
    place, size = int(block.removeprefix("block_")), len(stack.pattern)
    if part == "periods":
        return np.arange(stack.repeats) * size + place + 1
    period = stack.repeats if part == "rest" else int(part.removeprefix("period_"))
    return period * size + place + 1
