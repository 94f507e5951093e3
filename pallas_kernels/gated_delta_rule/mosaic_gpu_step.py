"""Hopper: one step, as in decoding, with one read and one write of the state; see `_linear_state.mosaic_gpu_step`."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._linear_state.mosaic_gpu_step import step
from pallas_kernels._linear_state.step import derived_as
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels.gated_delta_rule.xla import gated_delta_rule_xla


def gated_delta_rule_step(
    q: Float[Array, "B 1 J K"],
    k: Float[Array, "B 1 J K"],
    v: Float[Array, "B 1 H V"],
    beta: Float[Array, "B 1 H"],
    *,
    log_gate: Float[Array, "B 1 H"] | None = None,
    segment_ids: Int[Array, "B 1"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
    interpret: Any = None,
) -> Float[Array, "B 1 H V"] | tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """See `gated_delta_rule`. Its gradient is that of `xla`.

    A document begins behind a row's first token only, so no state of one step is of another document.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    gate, state = log_gate, initial_state
    if gate is None:
        gate = jnp.zeros(v.shape[:3], jnp.float32)
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    arrays = vary_alike(*(only_tokens(x, segment_ids) for x in (q, k, v, beta, gate)), state)
    run = partial(step, gate="head", scale=scale, interpret=interpret)
    names = ("q", "k", "v", "beta", "log_gate", "state")
    found: Any = derived_as(partial(_plain, scale=scale), run, dict(zip(names, arrays, strict=True)))
    o = only_tokens(found[0], segment_ids)
    return (o, found[1]) if output_final_state else o


def _plain(state: Array, *, scale: float, **arrays: Any) -> Any:
    return gated_delta_rule_xla(**arrays, initial_state=state, scale=scale, output_final_state=True)
