"""What a mixer does, kept where a caller asks for it: a memory's inputs, an engine's routes, attention's weights.

Flax's collection "intermediates" holds it: every scan and remat of a stack declares that collection. A call in which
the collection is not mutable, as in training, keeps nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import flax.linen as nn
from jaxtyping import Array

COLLECTION, NAME = "intermediates", "memory_core"
"""The collection that holds the core, and its name below its mixer."""
TABLES = "layer_tables"
"""Name of a mixer's tables in the collection."""
Recorded = Literal["routing", "attention"]
"""Tables that a mixer may keep: where tokens write and read, or weights of keys."""
_RECORDED: ContextVar[Recorded | None] = ContextVar("recorded", default=None)


def keep_core(module: nn.Module, core: Any, streams: Any) -> None:
    """Keep a memory's core and its streams for `jaxblt.mixers.memory.passages.follow`.

    Args:
      module: the mixer.
      core: with its weights.
      streams: of the call, by token.
    """
    if module.is_mutable_collection(COLLECTION):
        module.sow(COLLECTION, NAME, (core, streams))


@contextmanager
def record_tables(what: Recorded) -> Iterator[None]:
    """Let mixers that are traced in the block keep tables of one kind, if the collection is mutable."""
    token = _RECORDED.set(what)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def keep_tables(module: nn.Module, what: Recorded, make: Callable[[], dict[str, Array]]) -> None:
    """Keep tables [B, T, H, N] that `make` computes, only where `record_tables` asks for their kind."""
    if _RECORDED.get() == what:
        module.sow(COLLECTION, TABLES, make())


def kept_core(tree: Any) -> Any | None:
    """Return the core and streams that a mixer kept in a tree of the collection, or None."""
    return _kept(tree, NAME)


def kept_tables(tree: Any) -> Any | None:
    """Return the tables that a mixer kept in a tree of the collection, or None."""
    return _kept(tree, TABLES)


def _kept(tree: Any, name: str) -> Any | None:
    if not isinstance(tree, dict):
        return None
    if name in tree:
        return tree[name][-1]
    return next((found for below in tree.values() if (found := _kept(below, name)) is not None), None)
