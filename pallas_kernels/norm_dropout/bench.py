"""The op against the composition as XLA fuses it: `python -m pallas_kernels.norm_dropout.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark, in_fp32, kernels_for
from pallas_kernels._measure import Case
from pallas_kernels.norm_dropout import reference, xla
from pallas_kernels.norm_dropout.api import TABLE
from pallas_kernels.norm_dropout.shapes import SHAPES, NormDropoutShape


def plan(shape: NormDropoutShape, dtype: Any = jnp.bfloat16, *, interpret: bool = False) -> Plan:
    """Plan the versions against the composition with the same bits, and beside it with JAX's own (`bare`).

    The kernel is among the versions where it runs, or if `interpret` simulates it.
    """
    rows, weights, bits = jax.random.split(jax.random.key(1), 3)
    args = (
        jax.random.normal(rows, (shape.batch, shape.length, shape.dim), dtype),
        1 + 0.1 * jax.random.normal(weights, (shape.dim,)),
        jax.random.bits(bits, (2,), jnp.uint32),
    )
    options = {"rate": shape.rate, "epsilon": 1e-6}
    plain, stream = partial(reference.norm_dropout, **options), float(args[0].nbytes)
    versions = [Case("xla", partial(xla.norm_dropout, **options), args)]
    if interpret or kernels_for(TABLE, *args, **options):
        from pallas_kernels.norm_dropout import triton_gpu

        run = partial(triton_gpu.norm_dropout, interpret=interpret, **options)
        versions.append(Case("triton", run, args))
    return Plan(
        truth=Case("truth", partial(in_fp32, plain), args),
        plain=Case("plain", plain, args),
        versions=versions,
        # Count what backward moves: it reads x and the cotangent, which comes after y, and writes a gradient.
        work={"forward": Work(0.0, 2 * stream), "forward+backward": Work(0.0, 5 * stream)},
        bare=[Case("threefry", partial(_threefry, rate=shape.rate), args)],
    )


def _threefry(x: Any, scale: Any, seed: Any, *, rate: float) -> Any:
    """Compose the norm, dropout as of `nn.Dropout`, and ReLU, each rounded to x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    y = (wide * inverse * scale[None, None]).astype(x.dtype)
    if rate:
        kept = jax.random.bernoulli(jax.random.wrap_key_data(seed, impl="threefry2x32"), 1 - rate, x.shape)
        y = jnp.where(kept, y / (1 - rate), 0)
    return jax.nn.relu(y)


if __name__ == "__main__":
    print(benchmark("norm_dropout", SHAPES, plan))
