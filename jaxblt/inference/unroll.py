"""Layers one by one for decoding: a loop over layers copies all of their states at each byte."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax

from jaxblt.adapters.update.attach import stacks_of
from jaxblt.inference.decode import Decoder, DecoderState
from jaxblt.inference.narrow import narrow_params
from jaxblt.models import ModelConfig, StackState, unstack_periods, unstack_state

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


def _unrolled(config: ModelConfig) -> Any:
    stacks: Any = {name: dataclasses.replace(stack, scan=False) for name, stack in stacks_of(config).items()}
    return dataclasses.replace(config, **stacks)  # pyright: ignore[reportArgumentType]


@jax.jit
def unroll_params(params: Any) -> Any:
    """Take scanned blocks apart in parameters, or in arrays of `prepare_decoding`."""
    if not isinstance(params, dict):
        return params
    apart = unstack_periods(params) if isinstance(params.get(PERIODS), dict) else params
    return {name: below if name not in params else unroll_params(below) for name, below in apart.items()}


def unroll_state(state: DecoderState) -> DecoderState:
    """Convert the state of a decoder to that of `unrolled`."""
    is_stack = lambda x: isinstance(x, StackState)  # noqa: E731
    return jax.tree.map(lambda x: unstack_state(x) if is_stack(x) else x, state, is_leaf=is_stack)
