"""jax-linear-attention inside `shard_map`, compiled for H200s that are not here: each runs what one runs by itself."""

import os
import re
import sys

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblt.profiling.targets import devices_of
from pallas_kernels._dispatch import compiling_for
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_linear_attention import gated_linear_attention

DEVICES, AXIS = 4, "device"
KERNEL = re.compile(r' = (.*) custom-call\(.*custom_call_target="(mosaic_gpu\w*|__gpu\$xla\.gpu\.triton)"')
EXCHANGE = re.compile(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter")


def compiled(run: Callable[..., Any], shapes: Any, devices: int) -> str:
    """The program of one device; arrays are split along their first axis."""
    mesh = Mesh(np.array(devices_of("h200", DEVICES)[:devices]), (AXIS,))
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((devices, *a.shape[1:]), a.dtype, sharding=split), shapes
    )
    if devices > 1:
        run = jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec(AXIS))
    with jax.set_mesh(mesh), compiling_for(mesh.devices.flat[0]):
        return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).compile().as_text()


def kernels(text: str) -> Counter[tuple[str, ...]]:
    """How often each kernel is called, by its results and its target."""
    return Counter(match.groups() for match in map(KERNEL.search, text.splitlines()) if match)


def gradients(run: Callable[..., Any], cotangents: Any, floats: Any, ids: Any) -> Any:
    """Outputs and all gradients."""
    found, pullback = jax.vjp(lambda floats: run(**floats, segment_ids=ids), floats)
    return found, pullback(cotangents)


def call(op: Callable[..., Any], gate: str, length: int, heads: int) -> tuple[Callable[..., Any], Any]:
    """The op with a state and documents, and the shapes of `gradients`."""
    x = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
    per_head = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
    state = jax.ShapeDtypeStruct((1, heads, 128, 128), jnp.float32)
    floats = {"q": x, "k": x, "v": x, "initial_state": state}
    floats[gate] = jax.ShapeDtypeStruct(x.shape, jnp.float32) if gate == "log_key_gate" else per_head
    if op is gated_delta_rule:
        floats["beta"] = per_head
    ids = jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)
    run = partial(op, output_final_state=True, implementation="jla")
    return run, ((x, state), floats, ids)


def main() -> int:
    """Compiles all, prints a line each; 1 if several devices run other kernels than one, or exchange anything."""
    cases = {
        # in pieces of which a Triton kernel joins the states
        "gated_delta_rule": call(gated_delta_rule, "log_gate", 16_384, 8),
        "gated_linear_attention": call(gated_linear_attention, "log_gate", 1000, 8),
        "gated_linear_attention by key": call(gated_linear_attention, "log_key_gate", 1000, 8),
    }
    right = {}
    for name, (run, shapes) in cases.items():
        alone, spread = (compiled(partial(gradients, run), shapes, devices) for devices in (1, DEVICES))
        found = kernels(spread)
        print(f"jla: {name} over {DEVICES} GPUs: {found.total()} calls of {len(found)} kernels", flush=True)
        right |= {
            f"{name}: each device runs the kernels of one": found == kernels(alone) and len(found) > 1,
            f"{name}: nothing is exchanged": not EXCHANGE.search(spread),
        }
    run, shapes = cases["gated_linear_attention"]
    compiled(partial(gradients, jax.checkpoint(run)), shapes, DEVICES)
    print(f"jla: under remat over {DEVICES} GPUs: compiled")
    for what in (what for what, holds in right.items() if not holds):
        print(f"jla: not so: {what}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    # the package asks JAX for the GPU of this machine
    with mock.patch.object(jax, "devices", return_value=devices_of("h200", 1)):
        sys.exit(main())
