"""Train steps planned for H200s that are not here: a small one on one and two, a BLT's over sequence and heads."""

import math
import os
import sys
from dataclasses import astuple, replace
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.profiling.plan import StepMemory
from jaxblt.profiling.targets import devices_of
from jaxblt.training.experimental.offload import offload
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.compile_ahead import plan_step
from tests.mixer_table import table
from tests.training.tiny import tiny_recipe


def planned(recipe: Recipe) -> StepMemory:
    """Memory of the step on the recipe's mesh."""
    return plan_step(recipe, recipe.mesh.build(devices_of("h200", math.prod(astuple(recipe.mesh)))))


def blt(**mesh: int) -> Recipe:
    """Windows and a ring between patches: calls of cuDNN and Triton, which GSPMD cannot split."""

    def stack(dim: int, pattern: str) -> StackConfig:
        attention = AttentionConfig(dim=dim, num_heads=dim // 64, context_parallel="ring")
        return StackConfig(
            dim=dim,
            num_layers=len(pattern),
            pattern=pattern,
            mlp_dim=dim,
            mixers=table(attention=attention, window=64),
        )

    model = BLTConfig(
        encoder=stack(128, "W"), latent=stack(128, "A"), decoder=stack(128, "W"), hash=None, bridge_heads=2
    )
    patcher = PatcherConfig(mode="static", block_size=256, patch_size=4)
    recipe = tiny_recipe(mesh=mesh, model=model, patcher=patcher, dtype="bfloat16")
    return replace(recipe, data=replace(recipe.data, seq_len=2048))


def adamw_bytes(optimizer: optax.GradientTransformation, memory: str) -> Any:
    """Return the compiler's figures of an update of 134 M parameters, with moments in a memory of the H200's host."""
    device = SingleDeviceSharding(devices_of("h200", 1)[0])

    def placed(tree: Any, kind: str) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_in(device, x, kind)), tree
        )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    state = placed(jax.eval_shape(optimizer.init, params), memory)
    rows = jax.ShapeDtypeStruct((64, 4096), jnp.float32)
    given = (placed(params, "device"), state, placed(rows, "device"))
    return jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()


def _in(device: SingleDeviceSharding, x: Any, kind: str) -> SingleDeviceSharding:
    return device.with_memory_kind(kind if x.ndim else "device")


def main() -> int:
    """Plans all, prints a line each; 1 if a figure cannot be right."""
    one, two = (planned(tiny_recipe(mesh={"data": count})) for count in (1, 2))
    four = planned(blt(data=1, seq=2, tensor=2))
    for count, found in ((1, one), (2, two), (4, four)):
        print(f"plan of a step on {count} x h200: {found.total / 1e6:.1f} MB on each")
    adamw = optax.adamw(1e-3)
    near, far = adamw_bytes(adamw, "device"), adamw_bytes(offload(adamw), "pinned_host")
    for where, found in (("the device", near), ("the host", far)):
        device, temporary = found.argument_size_in_bytes / 1e6, found.temp_size_in_bytes / 1e6
        print(
            f"moments of 134 M parameters on {where}: arguments {device:.0f} MB, temporaries {temporary:.0f} MB"
        )
    right = {
        "moments on the host leave a third of the arguments": far.argument_size_in_bytes
        < 0.34 * near.argument_size_in_bytes,
        "and half of the memory": far.argument_size_in_bytes + far.temp_size_in_bytes
        < 0.6 * (near.argument_size_in_bytes + near.temp_size_in_bytes),
        "parameters are whole on both": one.arguments["parameters"] == two.arguments["parameters"] > 0,
        "each has half of the batch": one.arguments["batch"] == 2 * two.arguments["batch"] > 0,
        "and fewer activations": two.temporaries < one.temporaries,
        "gradients are summed over two": "all-reduce" in two.exchanged and not one.exchanged,
        "a split sequence exchanges": "collective-permute" in four.exchanged,
    }
    for what in (what for what, holds in right.items() if not holds):
        print(f"plan of a small step: not so: {what}\n{one}\n{two}\n{four}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
