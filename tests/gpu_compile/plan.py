"""Train steps planned for H200s that are not here: a small one on one and two, a BLT's over sequence and heads."""

import math
import os
import sys
from dataclasses import astuple, replace

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.profiling.plan import StepMemory
from jaxblt.profiling.targets import devices_of
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


def main() -> int:
    """Plans all, prints a line each; 1 if a figure cannot be right."""
    one, two = (planned(tiny_recipe(mesh={"data": count})) for count in (1, 2))
    four = planned(blt(data=1, seq=2, tensor=2))
    for count, found in ((1, one), (2, two), (4, four)):
        print(f"plan of a step on {count} x h200: {found.total / 1e6:.1f} MB on each")
    right = {
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
