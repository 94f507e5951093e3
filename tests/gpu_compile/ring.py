"""A ring's passes compiled for H200s that are not here: every exchange beside a kernel, memory falling with 1/P."""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.parallel import ZIGZAG, batch_sharding, context_attention, make_mesh
from jaxblt.profiling.targets import devices_of
from pallas_kernels._dispatch import compiling_for
from tests.gpu_compile.schedule import exchanges

TOKENS, HEADS, GROUPS, WIDTH = 2**19, 32, 8, 128


def compiled(devices: int) -> Any:
    """Output and gradients of a causal layer of TOKENS, split over devices."""

    def attend(*qkv: jax.Array) -> jax.Array:
        return context_attention(*qkv, causal=True, mode="ring", layout=ZIGZAG, implementation="mosaic_gpu")

    def passes(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, *pull(do)

    mesh = make_mesh(data=1, seq=devices, devices=devices_of("h200", devices))
    with jax.set_mesh(mesh), compiling_for(mesh.devices.flat[0]):
        split = batch_sharding(mesh)
        shapes = [
            jax.ShapeDtypeStruct((1, TOKENS, heads, WIDTH), jnp.bfloat16, sharding=split)
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        ]
        run = jax.jit(passes, out_shardings=split).trace(*shapes)
        return run.lower(lowering_platforms=("cuda",)).compile()


def main() -> int:
    """Compiles for two and four, prints a line each; 1 if an exchange waits alone or memory does not fall."""
    right, scratch = {}, {}
    for devices, messages in ((2, 1 + 2), (4, 3 + 5)):
        program = compiled(devices)
        found, scratch[devices] = exchanges(program.as_text()), program.memory_analysis().temp_size_in_bytes
        alone = [exchange.name for exchange in found if not exchange.kernels]
        print(
            f"ring of {devices} x h200: {len(found)} exchanges, {scratch[devices] / 1e9:.2f} GB of scratch on each"
        )
        right |= {
            f"over {devices} GPUs a kernel runs beside every exchange, not {alone}": not alone,
            # Keys travel in either pass; with them, two steps later, or else by themselves, the gradients of keys.
            f"over {devices} GPUs there are {messages} exchanges": len(found) == messages,
        }
    right["with twice as many GPUs each takes at most 0.7 times the scratch"] = scratch[4] <= 0.7 * scratch[2]
    for what in (what for what, holds in right.items() if not holds):
        print(f"ring: not so: {what}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
