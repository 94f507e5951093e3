"""The Hopper kernel against the XLA form and the floor: `python -m pallas_kernels.modal_conv.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, in_fp32, packed_ids
from pallas_kernels._conv.plans import by_position
from pallas_kernels._measure import Case
from pallas_kernels.modal_conv.hopper import SHORTEST
from pallas_kernels.modal_conv.mosaic_gpu import modal_conv_mosaic_gpu
from pallas_kernels.modal_conv.shapes import SHAPES, ModalConvShape
from pallas_kernels.modal_conv.xla import modal_conv_xla

CHUNK = 128
"""Steps per chunk of the XLA form, as by default."""

LONGEST_TRAINED = 1 << 20
"""Longer rows are timed forward only, as in inference."""


def plan(shape: ModalConvShape, *, interpret: bool = False) -> Plan:
    """Plan the kernel on bf16 streams with both gates against the XLA form.

    Both are checked against XLA in fp32. Decays from a few steps to an eighth of the row, weights that give every mode
    its share.
    """
    keys = jax.random.split(jax.random.key(1), 5)
    full, modes = (shape.batch, shape.channels, shape.length), (shape.channels, shape.modes)
    x, pre_gate, post_gate = (jax.random.normal(key, full, jnp.bfloat16) for key in keys[:3])
    log_poles = -jnp.exp(jax.random.uniform(keys[3], modes, minval=-jnp.log(shape.length / 8), maxval=0.0))
    residues = jax.random.normal(keys[4], modes) * jnp.sqrt(-log_poles / shape.modes)
    args: tuple[Any, ...] = (
        x,
        log_poles,
        residues,
        pre_gate,
        post_gate,
        *packed_ids(shape.batch, shape.length, shape.documents),
    )
    flops, stream = (2.0 * CHUNK + 4 * shape.modes) * x.size, float(x.nbytes)
    kernel = partial(modal_conv_mosaic_gpu, interpret=interpret)
    xla = by_position(modal_conv_xla, 3)
    # Count what moves: forward reads x and the gates and writes y; backward reads them and the cotangent and writes
    # three gradients.
    work = {"forward": Work(flops, 4 * stream), "forward+backward": Work(3 * flops, 11 * stream)}
    if shape.length > LONGEST_TRAINED:
        del work["forward+backward"]
    return Plan(
        truth=Case("truth", partial(in_fp32, xla), args),
        plain=Case("xla", xla, args),
        versions=[Case("mosaic_gpu", by_position(kernel, 3), args)],
        work=work,
    )


if __name__ == "__main__":
    print(benchmark("modal_conv", [shape for shape in SHAPES if shape.length >= SHORTEST], plan))
