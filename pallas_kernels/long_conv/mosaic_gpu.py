"""Hopper: values by kernels that keep a row on chip; so gradients up to 8,192 steps, above by `monarch` in XLA."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._hopper import as_chunks, as_rows
from pallas_kernels.long_conv.hopper import CLASSES, TILE, Ring
from pallas_kernels.long_conv.monarch_vjp import Form, gated
from pallas_kernels.long_conv.mosaic_gpu_backward import DY, POST, PRE, WARPGROUPS, X, differentiate
from pallas_kernels.long_conv.mosaic_gpu_long import convolve_long
from pallas_kernels.long_conv.mosaic_gpu_pass import convolve
from pallas_kernels.long_conv.mosaic_gpu_tables import spectrum, taps_gradient


def long_conv_mosaic_gpu(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
    gradients: bool = True,
    interpret: bool = False,
) -> Float[Array, "B D T"]:
    """See `long_conv`; what `hopper.why_not` refuses is not looked at again.

    Args:
      gradients: by the kernel, where it takes the length; False for those of `monarch`.
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    call = Call(gradients, interpret)
    form = Form(x.shape[2], 0 if causal else (filter.shape[1] - 1) // 2, x.dtype)
    taps = filter.astype(jnp.float32)
    y: Any = _conv(form, call, *vary_alike(taps, bias, x, pre_gate, post_gate))
    return y


class Call(NamedTuple):
    """Whether gradients are the kernel's, and whether all is simulated."""

    gradients: bool
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(
    form: Form,
    call: Call,
    filter: Array,
    bias: Array | None,
    x: Array,
    pre_gate: Array | None,
    post_gate: Array | None,
) -> Array:
    ring = Ring.of(x.shape[2], x.shape[0])
    least = (ring.classes - 1) * TILE + 1  # No tile lies behind a row's end as a whole.
    fill = ((0, 0), (0, 0), (0, max(least - x.shape[2], 0)))
    chunks = lambda z: as_chunks(jnp.pad(z, fill))  # noqa: E731
    gates = [None if z is None else chunks(z) for z in (pre_gate, post_gate)]
    run = convolve if ring.classes <= CLASSES else convolve_long
    y = run(ring, *spectrum(form, ring, filter, bias), chunks(x), *gates, interpret=call.interpret)
    return as_rows(y, x.shape)


def _forward(form: Form, call: Call, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _conv(form, call, *arrays), arrays


def _backward(form: Form, call: Call, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    ring = Ring.of(g.shape[2], g.shape[0])
    if call.gradients and ring.classes <= WARPGROUPS:
        return _gradients(form, ring, call.interpret, arrays, g)
    filter, bias, *streams = arrays
    blocks = [None if z is None else z[:, :, None] for z in streams]
    _, vjp = jax.vjp(lambda *args: gated(form, *args, None), filter, bias, *blocks)
    *weights, dx, dpre, dpost = vjp(g[:, :, None])
    return *weights, *(None if z is None else z[:, :, 0] for z in (dx, dpre, dpost))


def _gradients(form: Form, ring: Ring, interpret: bool, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    filter, bias, x, pre_gate, post_gate = arrays
    streams = {X: x, DY: g, PRE: pre_gate, POST: post_gate}
    chunks = {place: as_chunks(z) for place, z in streams.items() if z is not None}
    found = differentiate(ring, *spectrum(form, ring, filter, bias), chunks, interpret=interpret)
    dfilter = taps_gradient(form, ring, found.spectrum, filter)
    dbias = None if bias is None else found.bias.sum(1).astype(bias.dtype)
    return (
        dfilter,
        dbias,
        *(
            as_rows(found.streams[place], x.shape) if place in found.streams else None
            for place in (X, PRE, POST)
        ),
    )


_conv.defvjp(_forward, _backward)
