"""A small recipe's train step planned for H200s that are not here: one, and two that share the batch."""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu"}  # read when JAX starts, which then looks for no GPU

from jaxblt.profiling.plan import StepMemory
from jaxblt.profiling.targets import devices_of
from jaxblt.training.ahead import plan_step
from tests.training.tiny import tiny_recipe


def planned(data: int) -> StepMemory:
    """Memory of the step on `data` devices."""
    recipe = tiny_recipe(mesh={"data": data})
    return plan_step(recipe, recipe.mesh.build(devices_of("h200", data)))


def main() -> int:
    """Plans both, prints a line each; 1 if a figure cannot be right."""
    one, two = planned(1), planned(2)
    for count, found in ((1, one), (2, two)):
        print(f"plan of a small step on {count} x h200: {found.total / 1e6:.1f} MB on each")
    right = {
        "parameters are whole on both": one.arguments["parameters"] == two.arguments["parameters"] > 0,
        "each has half of the batch": one.arguments["batch"] == 2 * two.arguments["batch"] > 0,
        "and fewer activations": two.temporaries < one.temporaries,
        "gradients are summed over two": "all-reduce" in two.exchanged and not one.exchanged,
    }
    for what in (what for what, holds in right.items() if not holds):
        print(f"plan of a small step: not so: {what}\n{one}\n{two}", file=sys.stderr)
    return not all(right.values())


if __name__ == "__main__":
    sys.exit(main())
