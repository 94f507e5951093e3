"""Training in FP8 beside bf16, step by step: python -m experiments.benchmark fp8_loss --out FILE."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.benchmark.figures.saved import save
from experiments.benchmark.precision.fp8_step import Form, with_form

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe


def fp8_loss(
    out: str,
    recipe: str = "books",
    forms: tuple[Form, ...] = ("dtype", "delayed"),
    paths: tuple[str, ...] = (),
    steps: int = 1500,
    seconds: float = 90.0,
    every: int = 10,
) -> dict[str, Any]:
    """Train one recipe in several precisions from the same parameters on the same batches, turn by turn.

    Patches are static, four bytes each, so that no entropy model is needed. The gap is that of the mean loss over the
    last tenth of the steps, over the loss in bf16.

    Args:
      out: JSON file to write.
      recipe: its name.
      forms: as for `fp8_step`; the first is what others are compared with.
      paths: texts to train on, in folders train, validation and test; () is the recipe's own.
      steps: the most steps, and the learning rate's horizon.
      seconds: after which training ends, compilation not counted.
      every: steps between losses that are written.
    """
    import jax

    from jaxblt import recipes
    from jaxblt.training.start.setup import open_data, recipe_step, to_devices
    from jaxblt.training.start.timed_step import prepare

    base = without_entropies(recipes.get(recipe), paths, steps)
    mesh = base.mesh.build(jax.devices()[:1])
    losses: dict[str, list[float]] = {form: [] for form in forms}
    with jax.set_mesh(mesh):
        data = open_data(base, mesh)
        ready = {form: prepare(with_form(base, form), mesh) for form in forms}
        states = {form: made.state for form, made in ready.items()}
        programs: dict[str, Any] = {form: recipe_step(made.setup) for form, made in ready.items()}
        begin, skipped, step = time.perf_counter(), dict.fromkeys(forms, 0.0), 0
        while step < steps and (step < 2 or time.perf_counter() - begin < seconds):
            batch = to_devices(data.batch(step), mesh, base.data.batch_size)
            for form in forms:
                states[form], metrics = programs[form](states[form], batch)
                losses[form].append(metrics["bits_per_byte"])
                skipped[form] = metrics["skipped"]
            step += 1
            if step == 1:
                begin = float(losses[forms[-1]][0]) * 0 + time.perf_counter()
            elif step % every == 0:
                jax.block_until_ready(losses[forms[-1]][-1])
    found = {form: [float(loss) for loss in taken] for form, taken in losses.items()}
    last = {form: sum(taken[-max(step // 10, 1) :]) / max(step // 10, 1) for form, taken in found.items()}
    figures = {
        "recipe": recipe,
        "steps": step,
        "batch_bytes": base.data.batch_size * base.data.seq_len,
        "every": every,
        "bits_per_byte": {form: taken[every - 1 :: every] for form, taken in found.items()},
        "last_tenth": last,
        "gap": {form: value / last[forms[0]] - 1 for form, value in last.items()},
        "skipped": {form: float(count) for form, count in skipped.items()},
    }
    save("fp8_loss", out, figures)
    return figures


def without_entropies(recipe: "Recipe", paths: tuple[str, ...], steps: int) -> "Recipe":
    """Return the recipe with static patches instead of those of an entropy model, on other texts if there are any."""
    from jaxblt.patching import PatcherConfig

    changes: dict[str, Any] = {"train": replace(recipe.train, steps=steps, eval_every=0)}
    if recipe.patcher is not None:
        patcher = PatcherConfig(mode="static", patch_size=4, block_size=recipe.patcher.block_size)
        changes |= {"patcher": patcher, "entropy_run": None, "bytes_per_patch": None}
    if paths:
        changes["data"] = replace(recipe.data, paths=paths)
    return replace(recipe, **changes)
