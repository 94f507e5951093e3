"""Adapters that requests may choose, and the codes of rows that have chosen: values to the programs of a lane."""

from collections.abc import Sequence
from typing import Any

from jaxblt.adapters.update.attach import stacks_of
from jaxblt.adapters.update.row_adapters import Adapter, choose_adapters


def list_adapters(config: Any) -> tuple[int | str, ...]:
    """Return the adapters that a row may have in the place of the router's code; none without a router.

    Args:
      config: of the model.
    """
    adapters = [stack.adapter for stack in stacks_of(config).values() if stack.adapter is not None]
    experts = [adapter.blocks or 0 for adapter in adapters if adapter.router is not None]
    return ("base", "static", *range(min(experts))) if experts else ()


def choose_codes_of_rows(config: Any, adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return the collection "chosen" of rows with these adapters; empty if there is nothing to choose.

    A model with a router gets it for rows of None too: they share the program of the others.

    Raises:
      ValueError: as of `choose_adapters`.
    """
    if not list_adapters(config) and all(adapter is None for adapter in adapters):
        return {}
    return choose_adapters(config, adapters)
