"""Refuses rows that end before a router's first code: it would stay at its fallback, and learn nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn

from jaxblt.adapters.code.levels import first_step, levels_of
from jaxblt.adapters.code.router import Router


def check_first_codes[T](trace: Callable[[], T]) -> T:
    """Return what a trace of a model gives, once each router in it is known to give a code in the traced rows.

    Slots of patches that hold none count as steps, so that only a router that cannot act is refused.

    Raises:
      ValueError: the rows end before a router's first code.
    """

    def check(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Router) and context.method_name == "__call__":
            _check(context.module, args[0].shape[1])
        return call(*args, **options)

    with nn.intercept_methods(check):
        return trace()


def _check(module: Router, length: int) -> None:
    config = module.adapter.router
    level = min(levels_of(config), key=partial(first_step, config))
    first = first_step(config, level)
    if first < length:
        return
    decides = (
        f"Prefix.steps = {first}"
        if level == "prefix"
        else f"RouterConfig.lag * chunk = {config.lag} * {config.chunk}"
    )
    raise ValueError(
        f"router {'/'.join(module.path)!r} never gives a code: rows have {length} steps (bytes or slots of patches), "
        f"and its first code comes at step {first} ({decides}): lower that, or use longer rows "
        "(data.seq_len)"
    )
