"""The op against doubling over all steps: `python -m pallas_kernels.linear_scan.bench`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.linear_scan.reference import linear_scan_reference
from pallas_kernels.linear_scan.shapes import SHAPES, LinearScanShape
from pallas_kernels.linear_scan.xla import linear_scan_xla


def plan(shape: LinearScanShape) -> Plan:
    """Factors between 0 and 1 in fp32, as gates give them."""
    keys = jax.random.split(jax.random.key(1))
    full = (shape.batch, shape.length, shape.width)
    a = jax.nn.sigmoid(2 + jax.random.normal(keys[0], full))
    b = jax.random.normal(keys[1], full)
    return Plan(
        truth=Case("truth", linear_scan_reference, (a, b)),
        plain=Case("plain", _doubled, (a, b)),
        versions=[Case("xla", linear_scan_xla, (a, b))],
        work={
            "forward": Work(2.0 * b.size, 3.0 * b.nbytes),
            # Backward reads a, h and the cotangent, which comes after h, and writes both gradients.
            "forward+backward": Work(5.0 * b.size, 8.0 * b.nbytes),
        },
    )


def _doubled(a: Any, b: Any) -> Any:
    """log2 T passes over all steps, each kept for the gradient."""
    shift = 1
    while shift < a.shape[1]:
        late = ((0, 0), (shift, 0), (0, 0))
        b = b + a * jnp.pad(b[:, :-shift], late)
        a = a * jnp.pad(a[:, :-shift], late, constant_values=1)
        shift *= 2
    return b


if __name__ == "__main__":
    print(benchmark("linear_scan", [shape for shape in SHAPES if shape.length > 1], plan))
