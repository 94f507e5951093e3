"""The op against its steps as XLA fuses them: `python -m pallas_kernels.token_product.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, kernels_for
from pallas_kernels._measure import Case
from pallas_kernels.token_product import reference, xla
from pallas_kernels.token_product.api import TABLE
from pallas_kernels.token_product.shapes import SHAPES, TokenShape


def plan(shape: TokenShape, dtype: Any = jnp.bfloat16, *, interpret: bool = False) -> Plan:
    """Plan the kernel, where it runs or `interpret` simulates it, against XLA's form of the same steps."""
    keys = iter(jax.random.split(jax.random.key(1), 3 + len(shape.widths)))
    x = jax.random.normal(next(keys), (shape.tokens, shape.dim), dtype)
    scale = 1 + 0.1 * jax.random.normal(next(keys), (shape.dim,)) if shape.normed else None
    added = jax.random.normal(next(keys), (shape.tokens, shape.widths[0]), dtype) if shape.added else None
    kernels = tuple(
        shape.dim**-0.5 * jax.random.normal(next(keys), (shape.dim, n), dtype) for n in shape.widths
    )
    args, options = (x, kernels, scale, added), {"gated": shape.gated}
    versions = []
    if interpret or kernels_for(TABLE, *args, **options):
        from pallas_kernels.token_product import triton_gpu

        versions.append(
            Case("triton", partial(triton_gpu.token_product, interpret=interpret, **options), args)
        )
    moved = float(sum(kernel.nbytes for kernel in kernels) + x.nbytes)
    flops = 2.0 * shape.tokens * shape.dim * sum(shape.widths)
    return Plan(
        truth=Case("truth", partial(reference.token_product, **options), args),
        plain=Case("plain", partial(xla.token_product, **options), args),
        versions=versions,
        work={"forward": Work(flops, moved)},
    )


if __name__ == "__main__":
    print(benchmark("token_product", SHAPES, plan))
