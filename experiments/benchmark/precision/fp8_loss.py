"""Training in FP8 beside bf16, step by step: python -m experiments.benchmark fp8_loss --out FILE."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.benchmark.figures.saved import save
from experiments.benchmark.precision.step_kernels import Form, with_form
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxblt.training.recipe import Recipe


def fp8_loss(
    out: str,
    recipe: str = "books",
    forms: tuple[Form, ...] = ("dtype", "delayed"),
    paths: tuple[str, ...] = (),
    steps: int = 1500,
    seconds: float = 90.0,
    every: int = 10,
    rows: int | None = None,
    seeds: int = 1,
    head: int | None = None,
) -> dict[str, Any]:
    """Train one recipe in several precisions from the same parameters on the same batches, turn by turn.

    Patches are static, four bytes each, so that no entropy model is needed. The gap is that of the mean loss over the
    last tenth of the steps, over the loss in bf16. On texts that do not repeat, that loss is of bytes not seen before.

    Args:
      out: JSON file to write, anew after each seed. What stands outside of "seeds" is of the first.
      recipe: its name.
      forms: as for `step_kernels`; the first is what others are compared with.
      paths: texts to train on, in folders train, validation and test; () is the recipe's own.
      steps: the most steps, and the learning rate's horizon.
      seconds: after which training ends, compilation not counted.
      every: steps between losses that are written.
      rows: of a step; None for the recipe's.
      seeds: of parameters, dropout and the order of rows.
      head: channels of a head of a byte model's attention; None for the recipe's. FP8 attention takes 128.
    """
    import jax

    from experiments.benchmark.figures.intervals import over_seeds
    from jaxblt import recipes

    whole("--seeds", seeds, least=1)
    for name, value in (("--rows", rows), ("--head", head)):
        if value is not None:
            whole(name, value, least=1)
    base = without_entropies(with_heads(recipes.get(recipe), head), paths, steps, rows)
    mesh, found = base.mesh.build(jax.devices()[:1]), list[dict[str, Any]]()
    figures: dict[str, Any] = {}
    own = {} if head is None else {"head": head}
    for seed in range(seeds):
        found.append({"seed": seed, **_trained(with_seed(base, seed), forms, mesh, seconds, every)})
        figures = {
            "recipe": recipe,
            "batch_bytes": base.data.batch_size * base.data.seq_len,
            "every": every,
        } | own
        figures |= {name: value for name, value in found[0].items() if name != "seed"}
        if seeds > 1:
            gaps = {form: over_seeds([one["gap"][form] for one in found]) for form in forms[1:]}
            figures |= {"seeds": found, "gap_over_seeds": gaps}
        save("fp8_loss", out, figures)
    return figures


def _trained(
    base: "Recipe", forms: tuple[Form, ...], mesh: "Mesh", seconds: float, every: int
) -> dict[str, Any]:
    """Train all forms from one seed, and return their losses."""
    import jax

    from jaxblt.training.start.setup import open_data, recipe_step, to_devices
    from jaxblt.training.start.timed_step import prepare

    steps = base.train.steps
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
    return {
        "steps": step,
        "bits_per_byte": {form: taken[every - 1 :: every] for form, taken in found.items()},
        "last_tenth": last,
        "gap": {form: value / last[forms[0]] - 1 for form, value in last.items()},
        "skipped": {form: float(count) for form, count in skipped.items()},
    }


def with_heads(recipe: "Recipe", width: int | None) -> "Recipe":
    """Return the recipe of a byte model with heads of this width in each layer of attention; None changes nothing.

    Keys get as many heads as queries, as FP8 attention takes them.

    Raises:
      ValueError: the model is no byte model, or the width does not divide its own.
    """
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig

    if width is None:
        return recipe
    if not isinstance(recipe.model, ByteLMConfig):
        raise ValueError(
            f"--head {width} is for byte models, and recipe {recipe.name!r} is none: leave it out"
        )
    stack = recipe.model.stack
    if stack.dim % width:
        raise ValueError(f"--head {width} does not divide the width {stack.dim} of recipe {recipe.name!r}")
    heads = {"num_heads": stack.dim // width, "num_kv_heads": None, "head_dim": None}
    mixers = {
        name: replace(mixer, **heads) if isinstance(mixer, AttentionConfig) else mixer
        for name, mixer in stack.mixers.items()
    }
    return replace(recipe, model=replace(recipe.model, stack=replace(stack, mixers=mixers)))


def with_seed(recipe: "Recipe", seed: int) -> "Recipe":
    """Return the recipe with a seed of parameters, dropout and the order of rows."""
    return replace(recipe, train=replace(recipe.train, seed=seed), data=replace(recipe.data, seed=seed))


def without_entropies(
    recipe: "Recipe", paths: tuple[str, ...], steps: int, rows: int | None = None
) -> "Recipe":
    """Return the recipe with static patches instead of those of an entropy model, on other texts if there are any."""
    from jaxblt.patching import PatcherConfig

    changes: dict[str, Any] = {"train": replace(recipe.train, steps=steps, eval_every=0)}
    if recipe.patcher is not None:
        patcher = PatcherConfig(mode="static", patch_size=4, block_size=recipe.patcher.block_size)
        changes |= {"patcher": patcher, "entropy_run": None, "bytes_per_patch": None}
    data = {name: value for name, value in (("paths", paths), ("batch_size", rows)) if value}
    if data:
        changes["data"] = replace(recipe.data, **data)
    return replace(recipe, **changes)
