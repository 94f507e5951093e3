"""Every form against XLA's FFT and the floor: `python -m pallas_kernels.long_conv.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, in_fp32, packed_ids
from pallas_kernels._conv.gates import enter, leave
from pallas_kernels._conv.plans import by_position
from pallas_kernels._conv.toeplitz import toeplitz_product
from pallas_kernels._dispatch import current_device
from pallas_kernels._measure import Case
from pallas_kernels.long_conv.api import TABLE
from pallas_kernels.long_conv.groups import fewest_groups
from pallas_kernels.long_conv.shapes import SHAPES, LongConvShape
from pallas_kernels.long_conv.xla import long_conv_xla

LONGEST_MATRIX = 4096
"""Steps up to which one Toeplitz matrix a channel is a peer; at 8,192 it would be 3.3 TFLOP at B64 D768."""

MATRIX_BYTES = 2**32
"""Channels of more bytes of matrices are multiplied group after group."""


def plan(shape: LongConvShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Plan the table's entries beside XLA's FFT and the textbook, with both gates.

    All are checked against the FFT in fp32. Short rows of one document also as one Toeplitz matrix a channel, in XLA:
    version "toeplitz".
    """
    # Pass ids as an argument: the compiler would take minutes over what follows from ids that it knows.
    args = (*arguments(shape, dtype), *packed_ids(shape.batch, shape.length, shape.documents))
    stream, taps = float(args[0].nbytes), float(args[1].nbytes)
    # Leave out what is put together of two entries: it is timed as these.
    others = [entry for entry in TABLE if entry.name not in ("xla", "xla_or_monarch", "reference")]
    gated, device = partial(by_position, count=2, causal=shape.causal), current_device()
    able = [entry for entry in others if gated(partial(entry.why_not, device))(*args) is None]
    versions, xla = [Case(entry.name, gated(entry.run), args) for entry in able], gated(long_conv_xla)
    if shape.length <= LONGEST_MATRIX and shape.documents == 1:
        versions.append(Case("toeplitz", gated(full_toeplitz), args))
    return Plan(
        truth=Case("truth", partial(in_fp32, xla), args),
        plain=Case("xla", xla, args),
        versions=versions,
        # Take the floor of memory: a transform's FLOPs depend on the form that is chosen.
        work={
            "forward": Work(0.0, 4 * stream + taps),
            # Count what backward moves: it reads x, the gates, the taps and the cotangent, which comes after y, and
            # writes four gradients.
            "forward+backward": Work(0.0, 11 * stream + 3 * taps),
        },
    )


def full_toeplitz(x: Any, filter: Any, *, pre_gate: Any, post_gate: Any, causal: bool) -> Any:
    """Multiply by a whole Toeplitz matrix in x's dtype for each channel, sums in fp32."""
    u, length = enter(x, pre_gate, None), x.shape[2]
    offset = 0 if causal else filter.shape[1] // 2

    @jax.checkpoint
    def product(given: tuple[Any, Any]) -> Any:
        taps, u = given
        return toeplitz_product(taps, u[:, :, None], rows=length, offset=offset)[:, :, 0]

    groups = fewest_groups(x.shape[1], x.shape[1] * length**2 * x.dtype.itemsize, MATRIX_BYTES)
    by_group = jnp.moveaxis(u.reshape(u.shape[0], groups, -1, length), 1, 0)
    y = jax.lax.map(product, (filter.reshape(groups, -1, filter.shape[1]), by_group))
    return leave(jnp.moveaxis(y, 0, 1).reshape(x.shape), post_gate, None, x.dtype)


def arguments(shape: LongConvShape, dtype: Any) -> tuple[Any, ...]:
    """Draw x, taps of unit energy, and both gates."""
    keys = jax.random.split(jax.random.key(1), 4)
    full, taps = (shape.batch, shape.channels, shape.length), shape.taps
    x, pre_gate, post_gate = (jax.random.normal(key, full, dtype) for key in keys[:3])
    width = taps if shape.causal else 2 * taps - 1
    filter = jax.random.normal(keys[3], (shape.channels, width)) * width**-0.5
    return x, filter, pre_gate, post_gate


if __name__ == "__main__":
    print(benchmark("long_conv", SHAPES, plan))
