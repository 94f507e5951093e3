"""Times a recipe's train step on this machine: jaxblt benchmark RECIPE [--compare none full] [--out FILE]."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxblt.cli.recipe_options import parse_recipe_and
from jaxblt.models.remat import Remat
from jaxblt.outputs import check_output, write_text
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.runtime import MIN_TRIALS

ABOUT = (
    "Times the recipe's train step on the devices of this machine, on its first batch, and prints the median with its "
    "95 % interval, bytes a second and the memory that the step is planned to take. Every field of the recipe is an "
    "option besides."
)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The trials, and what is compared.

    Attributes:
      trials: steps that are timed, of each policy.
      compare: policies of remat to time instead of the recipe's, such as none full; ratios are to the first.
      out: file for the figures as JSON; None writes none.
      overwrite: replace it if it is there.
    """

    trials: int = MIN_TRIALS
    compare: tuple[Remat, ...] = ()
    out: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "trials", least=MIN_TRIALS)
        if len(set(self.compare)) < len(self.compare):
            raise ValueError(f"BenchmarkOptions.compare must differ among themselves, got {self.compare}")


def line_of(timed: dict[str, Any]) -> str:
    """Return what is printed of one policy."""
    seconds = timed["seconds"]
    low, high = (1e3 * seconds[name] for name in ("low", "high"))
    line = (
        f"remat {timed['remat']}: {1e3 * seconds['median']:.2f} ms a step ({low:.2f} to {high:.2f}), "
        f"{timed['bytes_per_second'] / 1e3:,.1f} KB/s, {timed['planned_bytes'] / 1e9:.3f} GB planned"
    )
    if "time_ratio" in timed:
        line += f"; {timed['time_ratio']:.2f} x the first's time, {timed['memory_ratio']:.2f} x its memory"
    return line


def main(argv: Sequence[str]) -> None:
    """Parse, then compile and time."""
    recipe, _, options = parse_recipe_and(argv, BenchmarkOptions(), prog="jaxblt benchmark", about=ABOUT)
    if options.out is not None:
        check_output("--out", options.out, inputs=(), overwrite=options.overwrite)
    from jaxblt.profiling.provenance import provenance
    from jaxblt.training.start.timed_step import time_steps

    timed = time_steps(recipe, recipe.mesh.build(), remat=options.compare, trials=options.trials)
    for one in timed:
        print(line_of(one))
    if options.out is not None:
        # Name the benchmark: kept records of other recipes are not compared with these
        figures = {"benchmark": f"step_{recipe.name}", "recipe": recipe.name, "steps": timed, **provenance()}
        write_text(options.out, json.dumps(figures, indent=1) + "\n")
