"""Memory of a recipe's train step on a GPU: jaxblt plan RECIPE [--mesh seq=8] [--context N] [--batch]."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxblt import recipes
from jaxblt.cli.mesh import without_free_axis
from jaxblt.cli.recipe_options import parse_recipe_and
from jaxblt.parallel.mesh import AXES
from jaxblt.training.recipe import Recipe
from jaxblt.validation import check_bounds, check_fields, check_read

ABOUT = (
    "Compiles the recipe's train step for a GPU that need not be here and prints the bytes on each device by part, the "
    "first remat policy that fits and the longest context that fits. --batch finds the largest batch of each policy "
    "instead. Every field of the recipe is an option besides."
)
POLICIES = ("none", "dots", "full", "offload")
STRETCH = 1024
"""Lengths are multiples of as many bytes a device along the sequence, and of a patcher's block."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The setting to plan for.

    Attributes:
      context: bytes of a row; None is the recipe's. Rows are as many as keep the recipe's bytes a step, at least one
        for each group of devices along the other axes.
      gpu: the type of GPU to compile for.
      memory_gb: of a GPU, in 10^9 bytes.
      longest: also find the longest context, by a few more compilations.
      batch: find instead the largest batch by remat, and the cheapest remat that holds the recipe's own; a few
        compilations each.
      fill: share of the memory that such a batch may take: plans leave out what the runtime takes.
    """

    context: int | None = None
    gpu: str = "h200"
    memory_gb: float = 141.0
    longest: bool = True
    batch: bool = False
    fill: float = 0.85

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "context", least=1)
        check_bounds(self, "memory_gb", above=0)
        check_bounds(self, "fill", above=0, most=1, why=": it is a share")
        check_read(self, "fill", needed="batch=True", is_read=self.batch)


def complete(recipe: Recipe, run_dir: str) -> tuple[Recipe, list[str]]:
    """Complete a recipe from its run and its entropy model's, else by assumption.

    Raises:
      ValueError: nothing tells what the entropy model is.
    """
    from jaxblt.training.start.compile_ahead import settle
    from jaxblt.training.stored.remote_run import holds_run
    from jaxblt.training.stored.resolved import inherit, read_resolved

    said = []
    if holds_run(run_dir):
        recipe = inherit(recipe, run_dir)
    if recipe.entropy_run is not None and recipe.entropy_model is None:
        name = Path(recipe.entropy_run).name
        if holds_run(recipe.entropy_run):
            model = read_resolved(recipe.entropy_run).recipe.model
        elif name in recipes.RECIPES:
            model = recipes.get(name).model
            said.append(f"entropy model of recipe {name}, which has no run yet")
        else:
            raise ValueError(
                f"{recipe.entropy_run} holds no run and {name!r} is no recipe: train the entropy model first"
            )
        recipe = replace(recipe, entropy_model=model)
    recipe, assumed = settle(recipe)
    return recipe, said + assumed


def report(recipe: Recipe, config: PlanConfig, measure: Callable[[Recipe], Any]) -> None:
    """Print the plan; `measure` compiles a recipe's step and gives its `StepMemory`."""
    from jaxblt.profiling.plan import first_that_fits
    from jaxblt.training.start.compile_ahead import with_remat

    memory = config.memory_gb * 1e9
    shown = ", ".join(f"{axis}={getattr(recipe.mesh, axis)}" for axis in AXES)
    rows, length = recipe.data.batch_size, recipe.data.seq_len
    print(
        f"{recipe.name} on {config.gpu} ({config.memory_gb:g} GB), mesh {shown}: {rows} x {length:,} bytes",
        flush=True,
    )
    choices = {"of the recipe": recipe} | {
        policy: changed
        for policy in POLICIES
        if (changed := replace(recipe, model=with_remat(recipe.model, policy))) != recipe
    }

    def total(recipe: Recipe) -> int:
        print(found := measure(recipe), flush=True)
        return found.total

    fits, tried = first_that_fits(choices, total, memory)
    for name, size in tried.items():
        print(f"remat {name:<14}{size / 1e9:9.2f} GB, {size / memory:.0%} of the GPU")
    print(
        f"fits with remat {fits}" if fits else "no remat policy fits: split over more devices or shorten rows"
    )
    if config.longest:
        print_longest(choices[fits or list(choices)[-1]], memory, measure)


def report_batches(recipe: Recipe, config: PlanConfig, measure: Callable[[Recipe], Any]) -> None:
    """Print the largest batch of each remat policy, and the cheapest policy that holds the recipe's own batch.

    Policies are asked from the cheapest on, until one holds that batch. Rows are those of a micro-batch.

    Raises:
      ValueError: no policy holds a row for each group of devices.
    """
    from jaxblt.profiling.plan import largest_batch
    from jaxblt.training.start.compile_ahead import with_remat

    memory, mesh = config.fill * config.memory_gb * 1e9, recipe.mesh
    group, wanted, best = mesh.data * mesh.fsdp, recipe.data.batch_size, None
    print(
        f"{recipe.name} on {config.gpu}: rows of {recipe.data.seq_len:,} bytes in {memory / 1e9:.1f} GB",
        flush=True,
    )
    for policy in POLICIES:

        def total(rows: int, policy: Any = policy) -> int:
            data, train = replace(recipe.data, batch_size=rows), replace(recipe.train, accumulate=1)
            changed = replace(recipe, model=with_remat(recipe.model, policy), data=data, train=train)
            return measure(changed).total

        found = largest_batch(total, memory=memory, multiple=group)
        if found is None:
            print(f"remat {policy:<8} does not hold {group} rows", flush=True)
            continue
        rows, sizes = found
        print(
            f"remat {policy:<8} {rows:6,} rows in {sizes[rows] / 1e9:.2f} GB, {len(sizes)} compiled",
            flush=True,
        )
        best = (policy, rows) if best is None or rows > best[1] else best
        if rows >= wanted:
            break
    if best is None:
        raise ValueError(
            f"no plan holds {group} rows of {recipe.data.seq_len} bytes in {memory / 1e9:g} GB: split over more "
            "devices (--mesh fsdp=2), or shorten data.seq_len"
        )
    _print_settings(replace(recipe, model=with_remat(recipe.model, best[0])), best, group, memory, measure)


def _print_settings(
    recipe: Recipe, best: tuple[str, int], group: int, memory: float, measure: Callable[[Recipe], Any]
) -> None:
    """Print the fewest micro-batches that hold the recipe's batch; gradients that are added up take memory too."""
    wanted = recipe.data.batch_size
    for parts in range(1, wanted // group + 1):
        if wanted % (parts * group) or wanted // parts > best[1]:
            continue
        size = measure(replace(recipe, train=replace(recipe.train, accumulate=parts))).total
        if size <= memory:
            told = f"{size / 1e9:.2f} GB"
            print(f"for the recipe's {wanted} rows: remat {best[0]}, --train.accumulate {parts} ({told})")
            return
    print(f"the recipe's {wanted} rows do not fit in micro-batches of {group} rows: shorten data.seq_len")


def print_longest(recipe: Recipe, memory: float, measure: Callable[[Recipe], Any]) -> None:
    """Print the longest context that fits, with the recipe's rows, mesh and remat."""
    from jaxblt.profiling.plan import longest_context

    block = STRETCH if recipe.patcher is None else recipe.patcher.block_size
    multiple, here = block * recipe.mesh.seq, recipe.data.seq_len
    half = max(here // 2 // multiple, 1) * multiple
    found = longest_context(
        lambda length: measure(replace(recipe, data=replace(recipe.data, seq_len=length))).total,
        memory=memory,
        lengths=(half, here if here != half else 2 * here),
        multiple=multiple,
    )
    if found is None:
        print(f"no context from {half:,} bytes up fits")
        return
    line = f"{found.line.base / 1e9:.2f} GB and {found.line.slope / 1e3:.2f} KB a byte of context"
    told = "the longest measured" if found.predicted is None else f"{found.predicted / 1e9:.2f} GB predicted"
    print(
        f"longest context  {found.context:,} bytes in {recipe.data.batch_size} rows: {found.memory / 1e9:.2f} GB "
        f"({told}; {line})"
    )


def main(argv: Sequence[str]) -> None:
    """Parse, then compile and print."""
    recipe, run_dir, config = parse_recipe_and(argv, PlanConfig(), prog="jaxblt plan", about=ABOUT)
    mesh = without_free_axis(recipe.mesh)
    from jaxblt.profiling.targets import devices_of
    from jaxblt.training.start.compile_ahead import at_context, plan_step

    count = mesh.data * mesh.fsdp * mesh.seq * mesh.tensor
    devices = mesh.build(devices_of(config.gpu, count))
    recipe, said = complete(recipe, run_dir)
    recipe = at_context(recipe, recipe.data.seq_len if config.context is None else config.context, mesh)
    for line in said:
        print(f"assumed: {line}")
    tell = report_batches if config.batch else report
    tell(recipe, config, functools.cache(lambda recipe: plan_step(recipe, devices)))
    print(
        "not counted: the CUDA context, NCCL's buffers, cuDNN's scratch for packed rows, and what the allocator loses "
        "between blocks; JAX takes 75 % of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
    )
