"""The Hopper kernel against the XLA form and the floor: `python -m pallas_kernels.linear_scan.bench`."""

from functools import partial
from typing import Any

import jax

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.linear_scan.api import linear_scan
from pallas_kernels.linear_scan.mosaic_gpu import linear_scan_mosaic_gpu
from pallas_kernels.linear_scan.shapes import SHAPES, LinearScanShape


def plan(shape: LinearScanShape, *, interpret: bool = False) -> Plan:
    """Plan factors between 0 and 1, as gates give them."""
    keys = jax.random.split(jax.random.key(1))
    full = (shape.batch, shape.length, shape.width)
    a = jax.nn.sigmoid(2 + jax.random.normal(keys[0], full)).astype(shape.dtype)
    b = jax.random.normal(keys[1], full, shape.dtype)
    given, states = float(a.nbytes + b.nbytes), 4.0 * b.size
    return Plan(
        truth=Case("truth", _named("reference"), (a, b)),
        plain=Case("xla", _named("xla"), (a, b)),
        versions=[Case("mosaic_gpu", partial(linear_scan_mosaic_gpu, interpret=interpret), (a, b))],
        work={
            "forward": Work(2.0 * b.size, given + states),
            # Count what backward moves: it reads a, h and the cotangent, which comes after h, and writes both
            # gradients.
            "forward+backward": Work(5.0 * b.size, 2 * given + a.nbytes + 3 * states),
        },
    )


def _named(implementation: Any) -> Any:
    return partial(linear_scan, implementation=implementation)


if __name__ == "__main__":
    print(benchmark("linear_scan", [shape for shape in SHAPES if shape.length > 1], plan))
