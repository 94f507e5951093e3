"""Rows that grow beside rows of one length, at equal bytes: python -m experiments.benchmark progressive --out FILE."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe


def progressive(
    out: str,
    recipe: str = "phage",
    steps: int = 120,
    seeds: int = 3,
    shares: tuple[float, ...] = (0.25, 0.5),
    divisors: tuple[int, ...] = (8, 2),
) -> dict[str, Any]:
    """Train a recipe with rows that grow and with full rows, and score both on full rows of the validation split.

    A step reads equal bytes in both: shorter rows are more rows. The gap is bits a byte of growing rows less those of
    fixed ones, by seed; below 0 growing rows are better.

    Args:
      out: file for the figures as JSON, written anew after each pair of runs.
      recipe: its name; its rows are windows without stride.
      steps: of each run.
      seeds: pairs of runs, with seeds 0, 1, ...
      shares: of the steps, after which rows grow.
      divisors: of the full length, that rows have until then.

    Raises:
      ValueError: shares and divisors are not as many, or there are no seeds.
    """
    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save

    if len(shares) != len(divisors) or seeds < 1:
        raise ValueError(
            f"progressive takes a divisor for each share and at least one seed, got {shares}, {divisors} and {seeds}"
        )
    figures: dict[str, Any] = {
        "recipe": recipe,
        "steps": steps,
        "shares": shares,
        "divisors": divisors,
        "runs": [],
    }
    for seed in range(seeds):
        fixed = of_one_length(recipe, steps, seed)
        both = {"fixed": fixed, "growing": growing(fixed, shares, divisors)}
        bits = {name: train(one) for name, one in both.items()}
        figures["runs"].append({"seed": seed, **bits, "gap": bits["growing"] - bits["fixed"]})
        figures["gap"] = over_seeds([run["gap"] for run in figures["runs"]])
        save("progressive", out, figures)
    return figures


def of_one_length(name: str, steps: int, seed: int) -> "Recipe":
    """Return the recipe with full rows, scored after its last step."""
    from jaxblt import recipes

    recipe = recipes.get(name)
    train = replace(recipe.train, steps=steps, seed=seed, eval_every=steps, checkpoint_every=steps)
    return replace(recipe, data=replace(recipe.data, stride=None, seed=seed), train=train)


def growing(recipe: "Recipe", shares: Sequence[float], divisors: Sequence[int]) -> "Recipe":
    """Return the recipe with shorter rows until those shares of its steps."""
    steps, length = recipe.train.steps, recipe.data.seq_len
    schedule = tuple(
        (int(share * steps), length // part) for share, part in zip(shares, divisors, strict=True)
    )
    data: Any = recipe.data
    return replace(recipe, data=replace(data, length_schedule=schedule))


def train(recipe: "Recipe") -> float:
    """Train in a folder that is thrown away, and return bits a byte of the validation split."""
    from jaxblt.training.loop import fit

    with TemporaryDirectory() as folder:
        return fit(recipe, Path(folder) / "run").validation["bits_per_byte"]
