"""Layers one by one for decoding: a loop over layers copies all of their states at each byte."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.inference.decode import Decoder, DecoderState
from jaxblt.inference.narrow import narrow_params
from jaxblt.models import StackConfig, StackState, unstack_periods, unstack_state
from jaxblt.models.adapter import CHOSEN

PERIODS = "periods"
"""The name of scanned blocks in parameters."""


def unroll(
    decoder: Decoder, params: dict[str, Any], state: DecoderState, *, rows: int
) -> tuple[Decoder, dict[str, Any], DecoderState]:
    """Prepare many calls of `decode_step`: layers one by one, weights in the decoder's dtype.

    Logits are the same; with adapters in 16 bits, whose matrices are joined, they are within rounding. Donate the
    state, and its caches stay where they are. `generate` decodes so.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}, as they are or of `prepare_decoding`.
      state: before the first of these calls, of `prefill` or `init_decoder`.
      rows: of the state.
    """
    apart, state, params = unrolled(decoder), jax.jit(unroll_state)(state), nn.meta.unbox(params)
    return apart, narrow_params(apart, rows, unroll_params(params), state), state


def unrolled(decoder: Decoder) -> Decoder:
    """Return the decoder with unrolled stacks, for `unroll_params` and `unroll_state`."""
    entropy = None if decoder.entropy is None else _unrolled(decoder.entropy)
    return dataclasses.replace(decoder, model=_unrolled(decoder.model), entropy=entropy)


def _unrolled(config: Any) -> Any:
    """Return a config whose stacks, and those of its parts, such as a level, run their layers one by one."""
    if isinstance(config, StackConfig):
        return dataclasses.replace(config, scan=False)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    parts = {name: _unrolled(part) for name, part in fields.items() if dataclasses.is_dataclass(part)}
    return dataclasses.replace(config, **parts)


@jax.jit
def unroll_params(params: Any) -> Any:
    """Take scanned blocks apart in parameters, or in arrays of `prepare_decoding`."""
    if not isinstance(params, dict):
        return params
    if CHOSEN in params:
        others = {name: below for name, below in params.items() if name != CHOSEN}
        return unroll_params(others) | {CHOSEN: _unroll_codes(params[CHOSEN], params["model"])}
    apart = unstack_periods(params) if isinstance(params.get(PERIODS), dict) else params
    return {name: below if name not in params else unroll_params(below) for name, below in apart.items()}


def _unroll_codes(codes: Any, params: Any) -> Any:
    """Give each block of a scan the codes of rows that all of them have."""
    if not isinstance(codes, dict):
        return codes
    if PERIODS not in codes:
        return {name: _unroll_codes(below, params.get(name)) for name, below in codes.items()}
    count = jax.tree.leaves(params[PERIODS])[0].shape[0]
    repeat = lambda x: jnp.broadcast_to(x, (count, *x.shape))  # noqa: E731
    return unstack_periods(codes | {PERIODS: jax.tree.map(repeat, codes[PERIODS])})


def unroll_state(state: DecoderState) -> DecoderState:
    """Convert the state of a decoder to that of `unrolled`."""
    is_stack = lambda x: isinstance(x, StackState)  # noqa: E731
    return jax.tree.map(lambda x: unstack_state(x) if is_stack(x) else x, state, is_leaf=is_stack)
