"""Hopper: one step, as in decoding, with one read and one write of the state; see `_linear_state.mosaic_gpu_step`."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels._linear_state.mosaic_gpu_step import Gate, step
from pallas_kernels._linear_state.step import run_step
from pallas_kernels.gated_linear_attention.xla import gated_linear_attention_xla

GATES: dict[str, Gate] = {"log_gate": "head", "log_key_gate": "key", "log_value_gate": "value"}


def gated_linear_attention_step(
    q: Float[Array, "B 1 J K"],
    k: Float[Array, "B 1 J K"],
    v: Float[Array, "B 1 H V"],
    *,
    log_gate: Float[Array, "B 1 H"] | None = None,
    log_key_gate: Float[Array, "B 1 J K"] | None = None,
    log_value_gate: Float[Array, "B 1 H V"] | None = None,
    segment_ids: Int[Array, "B 1"] | None = None,
    initial_state: Float[Array, "B H K V"] | None = None,
    output_final_state: bool = False,
    scale: float = 1.0,
    chunk_size: int = 64,
    interpret: Any = None,
) -> Float[Array, "B 1 H V"] | tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """Compute one step of `gated_linear_attention`.

    Its gradient is that of `xla`.

    Args:
      interpret: `InterpretGPUParams` to run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    given = {"log_gate": log_gate, "log_key_gate": log_key_gate, "log_value_gate": log_value_gate}
    name = next((name for name, gate in given.items() if gate is not None), "log_gate")
    plain = partial(_plain, name=name, scale=scale)
    run = partial(step, gate=GATES[name], scale=scale, interpret=interpret)
    streams, asked = {"q": q, "k": k, "v": v}, {"output_final_state": output_final_state}
    return run_step(plain, run, streams, given[name], initial_state, segment_ids, **asked)


def _plain(q: Array, k: Array, v: Array, log_gate: Array, state: Array, *, name: str, scale: float) -> Any:
    options: dict[str, Any] = {name: log_gate, "initial_state": state, "scale": scale}
    return gated_linear_attention_xla(q, k, v, **options, output_final_state=True)
