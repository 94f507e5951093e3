"""Bits a byte after training in fp32, bf16 and fp16: python -m experiments.benchmark half_precision --out FILE."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe

Dtype = Literal["float32", "bfloat16", "float16"]


def half_precision(
    out: str,
    recipe: str = "demo_entropy",
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16", "float16"),
    steps: int = 110,
    seeds: int = 3,
    eval_batches: int = 16,
    scale_every: int = 20,
) -> dict[str, Any]:
    """Train a recipe in several dtypes from the same parameters on the same rows, and score held-out bytes.

    The gap is bits a byte of a dtype less those of the first one, by seed. In fp16 the loss scale starts at 2^15; it
    doubles after `scale_every` good steps and halves after a step that overflows, which is skipped.

    Args:
      out: JSON file to write, anew after each seed.
      recipe: its name; its model reads no entropies.
      dtypes: of the computation; the first is what others are compared with.
      steps: of each run.
      seeds: runs of each dtype, with seeds 0, 1, ...
      eval_batches: of the validation split that are scored after the last step.
      scale_every: good steps after which the scale of fp16 doubles.

    Raises:
      ValueError: there are fewer than two dtypes, or no seeds.
    """
    from experiments.benchmark.figures.over_seeds import over_seeds
    from experiments.benchmark.figures.saved import save

    if len(dtypes) < 2 or seeds < 1:
        raise ValueError(
            f"half_precision compares two dtypes or more, and takes seeds, got {dtypes} and {seeds}"
        )
    figures: dict[str, Any] = {"recipe": recipe, "steps": steps, "scale_every": scale_every, "runs": []}
    with TemporaryDirectory() as folder:
        for seed in range(seeds):
            cases = {d: in_dtype(recipe, d, steps, seed, eval_batches, scale_every) for d in dtypes}
            found = {dtype: train(one, Path(folder)) for dtype, one in cases.items()}
            figures["runs"].append({"seed": seed, **found})
            gaps = {
                dtype: [
                    run[dtype]["bits_per_byte"] - run[dtypes[0]]["bits_per_byte"] for run in figures["runs"]
                ]
                for dtype in dtypes[1:]
            }
            figures["gap"] = {dtype: over_seeds(values) for dtype, values in gaps.items()}
            save("half_precision", out, figures)
    return figures


def in_dtype(name: str, dtype: Dtype, steps: int, seed: int, eval_batches: int, scale_every: int) -> "Recipe":
    """Return the recipe in that dtype, scored after its last step."""
    from jaxblt import recipes
    from jaxblt.precision import LossScaleConfig

    recipe = recipes.get(name)
    train = replace(
        recipe.train,
        steps=steps,
        seed=seed,
        dtype=dtype,
        eval_every=steps,
        eval_batches=eval_batches,
        checkpoint_every=steps,
        loss_scale=LossScaleConfig(every=scale_every) if dtype == "float16" else LossScaleConfig(),
    )
    return replace(recipe, data=replace(recipe.data, seed=seed), train=train)


def train(recipe: "Recipe", folder: Path) -> dict[str, float]:
    """Train in the folder, which keeps compiled programs for the other seeds, and return what came out."""
    from jaxblt.precision.scaling import LOSS
    from jaxblt.training.loop import fit

    recipe = replace(recipe, train=replace(recipe.train, compilation_cache=str(folder / "compiled")))
    fitted = fit(recipe, folder / f"{recipe.train.dtype}_{recipe.train.seed}")
    found = {
        "bits_per_byte": fitted.validation["bits_per_byte"],
        "skipped": int(fitted.state.skipped),
    }
    if fitted.state.scaling is not None:
        found["last_loss_scale"] = float(fitted.state.scaling[LOSS]["scale"])
    return found
