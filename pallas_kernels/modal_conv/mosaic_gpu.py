"""Hopper: one pass over memory forward, three backward (`mosaic_gpu_pass`, and for the modes `mosaic_gpu_vjp`).

With G = post_gate * dy and conv^T the convolution against time,

    dU = conv^T(G),    dx = pre_gate * dU,    dpre_gate = x * dU,    dpost_gate = dy * conv(pre_gate * x).

The state after a row is another pass, in XLA.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.documents import Marks, mark
from pallas_kernels._conv.gates import enter
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.modal_conv.edges import Modes
from pallas_kernels.modal_conv.hopper import rows_per_tile
from pallas_kernels.modal_conv.mosaic_gpu_pass import convolve
from pallas_kernels.modal_conv.mosaic_gpu_vjp import gradient_of_modes
from pallas_kernels.modal_conv.states import row_state


def modal_conv_mosaic_gpu(
    x: Float[Array, "B D T"],
    log_poles: Float[Array, "D M"],
    residues: Float[Array, "D M"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: Float[Array, "B D M"] | None = None,
    output_final_state: bool = False,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    chunk_size: int = 128,
    interpret: bool = False,
) -> Float[Array, "B D T"] | tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
    """Compute `modal_conv`; what `hopper.why_not` refuses is not checked again.

    Chunks are of 64. Short rows of a channel share a tile, if there are neither documents nor a first state.

    Args:
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    wide = [None if z is None else z.astype(jnp.float32) for z in (log_poles, residues, bias, initial_state)]
    x, *modes, state, pre_gate, post_gate = vary_alike(x, *wide, pre_gate, post_gate)
    marks = None if segment_ids is None else mark(segment_ids)
    alone = marks is not None or state is not None
    together = 1 if alone else rows_per_tile(x.shape[0], x.shape[2])
    y: Any = _conv(x, tuple(modes), state, pre_gate, post_gate, marks, together, interpret)
    if not output_final_state:
        return y
    final = row_state(enter(x, pre_gate, None), modes[0])
    return y, final if state is None else final + jnp.exp(x.shape[2] * modes[0])[None] * state


@partial(OwnGradient, nondiff_argnums=(6, 7))
def _conv(
    x: Array,
    modes: Modes,
    state: Array | None,
    pre_gate: Array | None,
    post_gate: Array | None,
    marks: Marks | None,
    together: int,
    interpret: bool,
) -> Array:
    gates = [] if post_gate is None else [post_gate]
    how: dict[str, Any] = {"marks": marks, "together": together, "interpret": interpret}
    (y,) = convolve(x, modes, pre_gate, gates, state=state, **how)
    return y


def _forward(*args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _conv(*args), args[:-2]


def _backward(together: int, interpret: bool, residuals: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, modes, state, pre_gate, post_gate, marks = residuals
    how: dict[str, Any] = {"marks": marks, "together": together, "interpret": interpret}
    factors = [] if pre_gate is None else [pre_gate, x]
    dx, *rest = convolve(dy, modes, post_gate, factors, reverse=True, **how)
    dpost_gate = (
        None if post_gate is None else _conv(x, modes, state, pre_gate, dy, marks, together, interpret)
    )
    dmodes, dstate = gradient_of_modes(x, modes, state, pre_gate, post_gate, dy, **how)
    return dx, dmodes, dstate, rest[0] if rest else None, dpost_gate, None


_conv.defvjp(_forward, _backward)
