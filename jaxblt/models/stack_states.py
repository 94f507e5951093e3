"""Checks and changes of a stack's state before its blocks read it."""

import dataclasses
from typing import Any

import jax

from jaxblt.mixers.driver.base import Clock


def check_depth(config: Any, state: Any) -> None:
    """Raise ValueError for the `StackState` of a stack of another depth than the `StackConfig`.

    Blocks without a state would begin anew each call.
    """
    if state.scanned != config.scan:
        raise ValueError(
            f"the state is of a stack with scan={state.scanned}, and this one has scan={config.scan}: make it by "
            "init_stack_state of the same config, or by unstack_state"
        )
    if state.scanned:
        repeats = max((len(leaf) for leaf in jax.tree.leaves(state.periods)), default=0)
        given = (repeats, len(state.periods), len(state.rest))
    else:
        blocks = max((len(period) for period in state.periods), default=0)
        given = (len(state.periods), blocks, len(state.rest))
    own = (config.repeats, len(config.pattern) if config.repeats else 0, len(config.remainder))
    if given != own:
        told = ["{} x {} + {} blocks".format(*counts) for counts in (given, own)]
        raise ValueError(
            f"the state holds {told[0]}, and the stack has {told[1]}: make it by init_stack_state of the same config"
        )


def share_clock(state: Any) -> Any:
    """Give all blocks of a `StackState` the first clock: all are equal, and XLA then counts once."""
    first: list[Clock] = []

    def shared(own: Any) -> Any:
        if not isinstance(getattr(own, "__dict__", {}).get("clock"), Clock):
            return own
        first.append(own.clock)
        return dataclasses.replace(own, clock=first[0])

    periods = tuple(tuple(map(shared, period)) for period in state.periods)
    return dataclasses.replace(state, periods=periods, rest=tuple(map(shared, state.rest)))
