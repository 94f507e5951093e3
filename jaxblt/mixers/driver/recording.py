"""The inputs of a memory, kept where a caller asks for it, so that reads and writes can be followed token by token.

Flax's collection "intermediates" holds it: every scan and remat of a stack declares that collection. A call in which
the collection is not mutable, as in training, keeps nothing.
"""

from typing import Any

import flax.linen as nn

COLLECTION, NAME = "intermediates", "memory_core"
"""The collection that holds the core, and its name below its mixer."""


def keep_core(module: nn.Module, core: Any, streams: Any) -> None:
    """Keep a memory's core and its streams for `jaxblt.mixers.memory.passages.follow`.

    Args:
      module: the mixer.
      core: with its weights.
      streams: of the call, by token.
    """
    if module.is_mutable_collection(COLLECTION):
        module.sow(COLLECTION, NAME, (core, streams))


def kept_core(tree: Any) -> Any | None:
    """Return the core and streams that a mixer kept in a tree of the collection, or None."""
    if not isinstance(tree, dict):
        return None
    if NAME in tree:
        return tree[NAME][-1]
    return next((found for below in tree.values() if (found := kept_core(below)) is not None), None)
