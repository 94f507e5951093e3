"""Which caches requests share: counted on the host, from prompts and adapters.

Codes are causal, so the caches of a row's first n tokens are decided by these tokens and by the codes at them. Rows of
one adapter share the caches of equal beginnings. A row of the router and one of the base do so, too, until the first
code of the router, if its fallback is 0.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblt.adapters.code.config import RouterConfig
from jaxblt.adapters.code.draw import Draw
from jaxblt.adapters.code.levels import levels_of
from jaxblt.adapters.code.sticky import Sticky
from jaxblt.adapters.code.transforms import Clamp, Confidence, Ema, Sparse, TopK
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.row_adapters import Adapter, choose_adapters
from jaxblt.data.vocab import encode

KEEPS_FALLBACK = (Confidence, Ema, Sticky, Draw)
"""Transforms that leave the fallback as it is."""
KEEPS_ZERO = (*KEEPS_FALLBACK, Clamp, Sparse, TopK)
"""Transforms that leave a fallback of 0 as it is."""


class SharedPrefixes(NamedTuple):
    """Tokens that earlier prompts of a list left in caches for each prompt.

    Attributes:
      shared: leading tokens of a prompt, its BOS included, whose caches an earlier prompt has made; 0 for the first.
      lengths: tokens of each prompt.
    """

    shared: list[int]
    lengths: list[int]

    @property
    def rate(self) -> float:
        """Share of all tokens that a cache of prefixes would not read again."""
        return sum(self.shared) / max(sum(self.lengths), 1)


def first_code(router: RouterConfig) -> int:
    """Return the step of a document at which a router may give its first code; the fallback stands before it."""
    steps = {"prefix": router.prefix, "chunk": router.lag * router.chunk, "token": 0}
    return min(steps[level] for level in levels_of(router))


def shared_prefixes(
    config: Any, prompts: Sequence[bytes], adapters: Sequence[Adapter] | None = None
) -> SharedPrefixes:
    """Count the tokens of each prompt whose caches an earlier one of the list has made.

    Of a model with patches the tokens are bytes, too: a stack of patches comes to its first code no sooner than in as
    many bytes. Where a transform may change the fallback, rows of the router and of a fixed code share nothing.

    Args:
      config: of the model.
      prompts: as for `jaxblt.inference.generate`.
      adapters: of each prompt, see `jaxblt.adapters.update.row_adapters`; None for the model as it is.

    Raises:
      ValueError: there is not one adapter for each prompt, or an adapter that there is not.
    """
    if adapters is not None and len(adapters) != len(prompts):
        raise ValueError(
            f"adapters must be one for each of the {len(prompts)} prompts, got {len(adapters)}: give None to prompts "
            "that have the router's codes"
        )
    rows = [encode(prompt, bos=True) for prompt in prompts]
    chosen = [None] * len(rows) if adapters is None else list(adapters)
    steps = _first_differences(config, list(dict.fromkeys(chosen)))
    shared = []
    for i, row in enumerate(rows):
        before = [(equal_tokens(row, rows[j]), steps[chosen[i], chosen[j]]) for j in range(i)]
        shared.append(max((n if most is None else min(n, most) for n, most in before), default=0))
    return SharedPrefixes(shared, [len(row) for row in rows])


def equal_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two rows have in common."""
    least = min(len(one), len(other))
    differ = np.flatnonzero(one[:least] != other[:least])
    return int(differ[0]) if len(differ) else least


def _first_differences(config: Any, adapters: list[Adapter]) -> dict[tuple[Adapter, Adapter], int | None]:
    """Return the step of a document from which codes of two adapters may differ, for each pair; None for never."""
    found: dict[tuple[Adapter, Adapter], int | None] = {(each, each): None for each in adapters}
    if adapters == [None]:
        return found
    stacks, chosen = stacks_of(config), choose_adapters(config, adapters)
    for i, j in permutations(range(len(adapters)), 2):
        pair = adapters[i], adapters[j]
        steps = [
            _differ_from(stacks[name].adapter, pair, _codes(tree, i, j)) for name, tree in chosen.items()
        ]
        found[pair] = min((step for step in steps if step is not None), default=None)
    return found


def _codes(chosen: Any, *rows: int) -> list[np.ndarray]:
    """Return the numbers that rows were given, of all routers of a stack."""
    leaves = jax.tree_util.tree_leaves_with_path(chosen)
    codes = [leaf for path, leaf in leaves if path[-1].key == "code"]
    return [np.concatenate([code[row] for code in codes]) for row in rows]


def _differ_from(
    adapter: AdapterConfig, pair: tuple[Adapter, Adapter], codes: Sequence[np.ndarray]
) -> int | None:
    """Return the step from which rows with these codes may differ in one stack, or in the router's place of one."""
    fixed = [code for each, code in zip(pair, codes, strict=True) if each is not None]
    if len(fixed) == len(pair):
        return None if np.array_equal(fixed[0], fixed[1]) else 0
    assert adapter.router is not None
    fallback = adapter.router.fallback * adapter.start
    keeping = KEEPS_FALLBACK if fallback else KEEPS_ZERO
    if not all(isinstance(transform, keeping) for transform in adapter.code) or np.any(fixed[0] != fallback):
        return 0
    return min(first_code(own.router) for own in adapter.by_level.values() if own.router is not None)
