"""States behind prompts that were read, so that a prompt that begins alike is read from there on only.

States are kept at a prompt's end and at the last piece's edge before it. They are also kept at every edge up to which
an earlier prompt had the same bytes. They stay under a budget of bytes, and the one that was not used for longest
leaves first. A state is used only where the prompt's own pieces end, and by requests of the same adapter. So the cache
changes no bit of what is drawn.
"""

from collections import OrderedDict
from typing import Any

import jax
import numpy as np

from jaxblt.adapters.update.row_adapters import Adapter
from jaxblt.inference.engine.programs import copy_prompt
from jaxblt.inference.prompts import Prefix

Key = tuple[int, Adapter, bytes]
"""A lane, the adapter that the ids were read with, and the ids."""

MOST_SEEN = 65_536
"""Edges of prompts that are remembered without a state."""


class PrefixCache:
    """States behind prompts, by the bytes that they have read.

    Attributes:
      used: bytes of the states.
    """

    def __init__(self, budget: int, piece: int) -> None:
        """Begin without states.

        Args:
          budget: bytes of states at the most.
          piece: ids of a whole piece of a prompt.
        """
        self._budget, self._piece, self.used = budget, piece, 0
        self._kept: OrderedDict[Key, tuple[Prefix, int]] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()

    def put(self, lane: int, adapter: Adapter, ids: np.ndarray, stop: int, prompts: Prefix, row: int) -> None:
        """Keep the state behind the ids 0..stop of a prompt, if later prompts are likely to ask for it."""
        if not self._budget or (size := _size(prompts) // len(prompts[1])) > self._budget:
            return
        key = (lane, adapter, ids[:stop].tobytes())
        last = (len(ids) - 1) // self._piece * self._piece
        if stop not in (len(ids), last) and not self._is_known(hash(key)):
            return
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        while self.used + size > self._budget:
            _, (_, freed) = self._kept.popitem(last=False)
            self.used -= freed
        self._kept[key] = (copy_prompt(prompts, row), size)
        self.used += size

    def _is_known(self, edge: int) -> bool:
        """Return whether a prompt has passed an edge before, and remember it."""
        if edge in self._seen:
            return True
        self._seen[edge] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def take(self, lane: int, adapter: Adapter, ids: np.ndarray) -> tuple[int, Prefix | None]:
        """Return how many ids of a prompt are known, and the state behind them; 0 and None if there is none.

        The state is the cache's own: copy it before a call uses it up.
        """
        edges = range((len(ids) - 1) // self._piece * self._piece, 0, -self._piece)
        for stop in (len(ids), *edges) if self._kept else ():
            key = (lane, adapter, ids[:stop].tobytes())
            if key in self._kept:
                self._kept.move_to_end(key)
                return stop, self._kept[key][0]
        return 0, None


def _size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
