"""Hopper: values and gradients by kernels that keep a row on chip."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import enter, leave, only_tokens
from pallas_kernels._hopper import as_chunks, as_rows
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.long_conv.blocks import BLOCK
from pallas_kernels.long_conv.hopper import CLASSES, LONGEST_ON_CHIP, PAIR, TILE, Ring, is_read_flat
from pallas_kernels.long_conv.monarch_vjp import Form
from pallas_kernels.long_conv.mosaic_gpu_backward import DY, POST, PRE, X, differentiate
from pallas_kernels.long_conv.mosaic_gpu_flat import Flat
from pallas_kernels.long_conv.mosaic_gpu_long import convolve_long
from pallas_kernels.long_conv.mosaic_gpu_long_backward import differentiate_long
from pallas_kernels.long_conv.mosaic_gpu_outer import (
    classes_of,
    convolve_by_classes,
    differentiate_by_classes,
)
from pallas_kernels.long_conv.mosaic_gpu_packed import convolve_within_blocks
from pallas_kernels.long_conv.mosaic_gpu_pass import convolve
from pallas_kernels.long_conv.mosaic_gpu_tables import spectrum, taps_gradient
from pallas_kernels.long_conv.packed import Parts, packed_rows


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
    dtype: Any = jnp.float32,
    interpret: bool = False,
) -> Float[Array, "B D T"]:
    """Compute `long_conv`; what `hopper.why_not` refuses is not checked again.

    Args:
      dtype: of what kernels do element by element; in fp16 they do two numbers at a time.
      interpret: run on the CPU in Pallas' simulation of a GPU, for tests.
    """
    call = Call(interpret, jnp.dtype(dtype))
    centre, length = 0 if causal else (filter.shape[1] - 1) // 2, x.shape[2]
    taps = filter.astype(jnp.float32)
    if segment_ids is not None and segment_alignment < length:
        u = enter(x, pre_gate, segment_ids)
        options = {"centre": centre, "causal": causal, "alignment": segment_alignment}
        y = packed_rows(u, taps, jnp.abs(segment_ids), **options, parts=_parts(call))
        y = y if bias is None else y + bias.astype(y.dtype)[None, :, None] * u.astype(y.dtype)
        return leave(y, post_gate, segment_ids, x.dtype)
    streams = (None if z is None else only_tokens(z, segment_ids) for z in (x, pre_gate, post_gate))
    y: Any = _conv(Form(length, centre, x.dtype), call, *vary_alike(taps, bias, *streams))
    return only_tokens(y, segment_ids)


def _parts(call: "Call") -> Parts:
    """Return what packed rows are put together from, each in fp32."""

    def within(u: Array, filter: Array, documents: Array) -> Array:
        return convolve_within_blocks(u, filter, documents, interpret=call.interpret).astype(jnp.float32)

    def product(
        filter: Float[Array, "D F"], u: Float[Array, "B D N C"], *, rows: int, offset: int
    ) -> Float[Array, "B D N rows"]:
        """Convolve blocks as rows; taps before the first of a block's outputs are negative lags."""
        batch, channels, blocks, columns = u.shape
        x = jnp.moveaxis(u, 2, 1).reshape(batch * blocks, channels, columns)
        form = Form(columns, offset, u.dtype)
        y: Any = _conv(form, call, *vary_alike(filter, None, x, None, None))
        wide = y[..., :rows].astype(jnp.float32).reshape(batch, blocks, channels, rows)
        return jnp.moveaxis(wide, 1, 2)

    return Parts(BLOCK, within, lambda size: product)


class Call(NamedTuple):
    """The static part: whether kernels are simulated, and the dtype of products element by element."""

    interpret: bool
    dtype: Any

    @property
    def options(self) -> dict[str, Any]:
        """The options of each kernel."""
        return {"interpret": self.interpret, "dtype": self.dtype}

    def ring(self, length: int, batch: int) -> tuple[Ring, Any]:
        """Return the ring of rows of so many steps, and the kernel that convolves them.

        In fp16 a row of more than two tiles is shared by two warpgroups: all of it then fits into their registers.
        """
        ring = Ring.of(length, batch)
        most = CLASSES if self.dtype == jnp.float32 else PAIR
        return (ring, convolve) if ring.classes <= most else (ring.even, convolve_long)


@partial(OwnGradient, nondiff_argnums=(0, 1))
def _conv(
    form: Form,
    call: Call,
    filter: Array,
    bias: Array | None,
    x: Array,
    pre_gate: Array | None,
    post_gate: Array | None,
) -> Array:
    if x.shape[2] > LONGEST_ON_CHIP:
        arrays = (filter, bias, x, pre_gate, post_gate)
        return convolve_by_classes(form, classes_of(x.shape[2]), arrays, **call.options)
    ring, run = call.ring(x.shape[2], x.shape[0])
    if run is convolve and (flat := _flat(ring, x.shape)) is not None:
        streams = (x, pre_gate, post_gate)
        return run(ring, *spectrum(form, ring, filter, bias), *streams, **call.options, flat=flat)
    gates = (None if z is None else _chunks(ring, z) for z in (pre_gate, post_gate))
    y = run(ring, *spectrum(form, ring, filter, bias), _chunks(ring, x), *gates, **call.options)
    return as_rows(y, x.shape)


def _flat(ring: Ring, shape: tuple[int, ...]) -> Flat | None:
    """Return rows that are read where they lie, or None."""
    batch, channels, length = shape
    return Flat(ring, length, batch * channels) if is_read_flat(batch * channels, length) else None


def _chunks(ring: Ring, z: Float[Array, "B D T"]) -> Float[Array, "R N 64"]:
    """Cut rows into chunks, so long that no tile lies behind their end as a whole."""
    least = (ring.classes - 1) * TILE + 1
    return as_chunks(jnp.pad(z, ((0, 0), (0, 0), (0, max(least - z.shape[2], 0)))))


def _forward(form: Form, call: Call, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _conv(form, call, *arrays), arrays


def _backward(form: Form, call: Call, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    if g.shape[2] > LONGEST_ON_CHIP:
        return differentiate_by_classes(form, classes_of(g.shape[2]), arrays, g, **call.options)
    return _gradients(form, call, arrays, g)


def _gradients(form: Form, call: Call, arrays: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    filter, bias, x, pre_gate, post_gate = arrays
    ring = Ring.of(g.shape[2], g.shape[0])
    run, ring = (differentiate, ring) if ring.classes <= PAIR else (differentiate_long, ring.even)
    streams = {X: x, DY: g, PRE: pre_gate, POST: post_gate}
    given = {place: z for place, z in streams.items() if z is not None}
    flat = _flat(ring, g.shape) if run is differentiate else None
    options: dict[str, Any] = call.options if flat is None else call.options | {"flat": flat}
    if flat is None:
        given = {place: _chunks(ring, z) for place, z in given.items()}
    found = run(ring, *spectrum(form, ring, filter, bias), given, **options)
    gradients = found.streams
    if flat is None:
        gradients = {place: as_rows(z, x.shape) for place, z in gradients.items()}
    dfilter = taps_gradient(form, ring, found.spectrum, filter)
    dbias = None if bias is None else found.bias.sum(1).astype(bias.dtype)
    return dfilter, dbias, *(gradients.get(place) for place in (X, PRE, POST))


_conv.defvjp(_forward, _backward)
