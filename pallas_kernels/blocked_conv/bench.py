"""The Hopper kernel against the XLA form and the floor: `python -m pallas_kernels.blocked_conv.bench`."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, in_fp32, packed_ids
from pallas_kernels._conv.plans import by_position
from pallas_kernels._measure import Case
from pallas_kernels.blocked_conv.mosaic_gpu import blocked_conv_mosaic_gpu
from pallas_kernels.blocked_conv.shapes import SHAPES, BlockedConvShape
from pallas_kernels.blocked_conv.xla import blocked_conv_xla


def plan(shape: BlockedConvShape, *, interpret: bool = False) -> Plan:
    """Plan the kernel on bf16 streams with both gates against the XLA form.

    Both are checked against XLA in fp32.
    """
    keys = jax.random.split(jax.random.key(1), 4)
    full = (shape.batch, shape.channels, shape.length)
    x, pre_gate, post_gate = (jax.random.normal(key, full, jnp.bfloat16) for key in keys[:3])
    filter = jax.random.normal(keys[3], (shape.channels, shape.taps)) * shape.taps**-0.5
    args = (x, filter, pre_gate, post_gate, *packed_ids(shape.batch, shape.length, shape.documents))
    flops, stream = 2.0 * shape.taps * x.size, float(x.nbytes)
    kernel = partial(blocked_conv_mosaic_gpu, interpret=interpret)
    xla = by_position(blocked_conv_xla, 2)
    return Plan(
        truth=Case("truth", partial(in_fp32, xla), args),
        plain=Case("xla", xla, args),
        versions=[Case("mosaic_gpu", by_position(kernel, 2), args)],
        work={
            "forward": Work(flops, 4 * stream),
            # Count what backward moves: it reads x, the gates and the cotangent, which comes after y, and writes three
            # gradients.
            "forward+backward": Work(3 * flops, 11 * stream),
        },
    )


if __name__ == "__main__":
    print(benchmark("blocked_conv", [shape for shape in SHAPES if shape.causal], plan))
