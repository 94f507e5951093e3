"""Arrays of a Hyena mixer's train step at a million steps, compiled for an H200: in fp32 an eighth of a stream."""

import os
import sys
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import SingleDeviceSharding

from jaxblt.mixers import HyenaConfig, ImplicitFilter
from jaxblt.profiling.targets import devices_of
from pallas_kernels.runtime import compiling_for
from tests.gpu_compile.arrays import largest

CHANNELS, LENGTH = 768, 1_000_000


def compiled_step() -> str:
    """Values and gradients of one row by an implicit filter as long, in bf16."""
    module = HyenaConfig(CHANNELS, filter=ImplicitFilter(LENGTH), packed=False).build(dtype=jnp.bfloat16)
    (device,) = devices_of("h200", 1)
    x = jax.ShapeDtypeStruct((1, LENGTH, CHANNELS), jnp.bfloat16)
    params = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))

    def step(params: Any, x: Any, dy: Any) -> Any:
        y, backward = jax.vjp(lambda params, x: module.apply(params, x)[0], params, x)
        return y, backward(dy)

    there = SingleDeviceSharding(device)
    shapes = [
        jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=there), z)
        for z in (params, x, x)
    ]
    with compiling_for(device):
        program = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    return program.as_text() or ""


def main() -> int:
    """Compiles it, prints what it found; 1 if an array is too large or the kernels are not there."""
    text, stream = compiled_step(), CHANNELS * LENGTH
    wide, narrow = largest(text, "f32"), largest(text, "bf16")
    print(f"long rows: fp32 arrays of at most {wide / stream:.2f} streams, bf16 {narrow / stream:.2f}")
    right = {
        "the streams are there": narrow >= stream,
        "it runs the kernels": "mosaic_gpu" in text,
        "an eighth of the taps in fp32, and room for their spans": wide <= stream / 8 * 1.05,
    }
    for what in (what for what, holds in right.items() if not holds):
        print(f"long rows: not so: {what}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
