"""A causal ring compiled for H200s that are not here: a kernel beside every exchange, less memory with more GPUs."""

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

HEADS, GROUPS, WIDTH = 32, 8, 128
LONG, SHORT = 2**19, 2**15
CASES = ((2, LONG, 1 + 2), (4, LONG, 3 + 5), (4, SHORT, 3 + 5))
"""GPUs, tokens in total, and messages: keys travel in either pass, their gradients from two steps later on, with them
or by themselves."""


def compiled(devices: int, tokens: int) -> Any:
    """Output and gradients of a causal layer, split over devices."""

    def attend(*qkv: jax.Array) -> jax.Array:
        return context_attention(*qkv, causal=True, mode="ring", layout=ZIGZAG)

    def passes(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, backward = jax.vjp(attend, q, k, v)
        return o, *backward(do)

    mesh = make_mesh(data=1, seq=devices, devices=devices_of("h200", devices))
    with jax.set_mesh(mesh), compiling_for(mesh.devices.flat[0]):
        split = batch_sharding(mesh)
        shapes = [
            jax.ShapeDtypeStruct((1, tokens, heads, WIDTH), jnp.bfloat16, sharding=split)
            for heads in (HEADS, GROUPS, GROUPS, HEADS)
        ]
        run = jax.jit(passes, out_shardings=split).trace(*shapes)
        return run.lower(lowering_platforms=("cuda",)).compile()


def main() -> int:
    """Compiles all, prints a line each; 1 if an exchange waits alone or memory does not fall."""
    right, scratch = {}, {}
    for devices, tokens, messages in CASES:
        program, name = compiled(devices, tokens), f"{tokens} tokens over {devices} GPUs"
        found = exchanges(program.as_text())
        scratch[devices, tokens] = program.memory_analysis().temp_size_in_bytes
        alone = [exchange.name for exchange in found if not exchange.kernels]
        print(
            f"ring of {name}: {len(found)} exchanges, {scratch[devices, tokens] / 1e9:.2f} GB of scratch on each"
        )
        right |= {
            f"{name}: a kernel runs beside every exchange, not {alone}": not alone,
            f"{name}: {messages} exchanges": len(found) == messages,
        }
    most = 0.7 * scratch[2, LONG]
    right["with twice as many GPUs each takes at most 0.7 times the scratch"] = scratch[4, LONG] <= most
    for what in (what for what, holds in right.items() if not holds):
        print(f"ring: not so: {what}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
