"""An adapter for each row of a batch, as values to one program: an expert of a bank, the base, or the router's code.

Contexts such as `override.override_codes` act while a function is traced, so a program that is compiled already
does not see them. What is chosen here is an argument of the program, as parameters are.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxblt.adapters.code.router import ROUTER
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.models.stack import StackConfig, block_names

Adapter = int | Literal["base", "static"] | None
"""Of a row: the number of an expert of a bank; "base" for a code of 0; "static" for the code that a router starts from,
1 or an even share of a bank; None for the code that the router makes."""


def choose_adapters(config: Any, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return the collection "chosen" of a model whose rows have these adapters.

    Routers run all the same, so that a row may go back to their codes in a later call with its state.

    Args:
      config: of the model.
      adapters: of each row.

    Raises:
      ValueError: no stack has an adapter with a router, or a row names an expert that there is not.
    """
    found = {name: stack.adapter for name, stack in stacks_of(config).items() if stack.adapter is not None}
    routed = {name: adapter for name, adapter in found.items() if adapter.router is not None}
    if not routed:
        raise ValueError(
            f"adapters are chosen in the place of a router's code, and {type(config).__name__} has no router: leave "
            "adapters out, or attach an AdapterConfig with one"
        )
    taken = np.array([each is not None for each in adapters])
    codes = {name: np.stack([_code(adapter, each) for each in adapters]) for name, adapter in routed.items()}
    return {name: choose_codes(stacks_of(config)[name], codes[name], taken) for name in routed}


def choose_codes(stack: StackConfig, codes: Any, taken: Any) -> dict[str, Any]:
    """Return a stack's part of the collection "chosen": codes of rows, of all levels, and the rows that take them."""
    adapter = stack.adapter
    parts = [{"code": code, "taken": taken} for code in adapter.split(codes)]
    found = {ROUTER: dict(zip(adapter.level_names, parts, strict=True)) if adapter.levels else parts[0]}
    if not adapter.of_blocks:
        return found
    return {period: dict.fromkeys(blocks, found) for period, blocks in block_names(stack).items()}


def _code(adapter: AdapterConfig, chosen: Adapter) -> np.ndarray:
    """Return the numbers of a row's code; of no account for None."""
    if chosen is None or chosen == "base":
        return np.zeros(adapter.width, np.float32)
    if chosen == "static":
        return np.full(adapter.width, adapter.start, np.float32)
    experts = adapter.blocks or 0
    if isinstance(chosen, bool) or not isinstance(chosen, int | np.integer) or not 0 <= chosen < experts:
        numbers = f"a number from 0 to {experts - 1}, " if experts else ""
        raise ValueError(f"adapter {chosen!r} of a row: expected {numbers}'base', 'static' or None")
    return np.tile(np.eye(experts, dtype=np.float32)[int(chosen)], len(adapter.level_names))
