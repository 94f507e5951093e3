"""Hopper: one step, as in decoding, with one read and one write of the state; see `_linear_state.mosaic_gpu_step`."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels._linear_state.mosaic_gpu_step import step
from pallas_kernels._linear_state.step import run_step
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
    """Compute one step of `gated_delta_rule`.

    Its gradient is that of `xla`.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    run = partial(step, gate="head", scale=scale, interpret=interpret)
    streams, asked = {"q": q, "k": k, "v": v, "beta": beta}, {"output_final_state": output_final_state}
    return run_step(partial(_plain, scale=scale), run, streams, log_gate, initial_state, segment_ids, **asked)


def _plain(state: Array, *, scale: float, **arrays: Any) -> Any:
    return gated_delta_rule_xla(**arrays, initial_state=state, scale=scale, output_final_state=True)
