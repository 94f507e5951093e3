"""A train step of a billion parameters in FP8 and in bf16: python -m experiments.benchmark fp8_step --out FILE."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from experiments.benchmark.figures.saved import save
from experiments.benchmark.splitting.split_step import Model, read_mesh, step_recipe

if TYPE_CHECKING:
    from jaxblt.training.recipe import Recipe

Form = Literal["dtype", "delayed", "current", "float16"]
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200's datasheet."""


def fp8_step(
    out: str,
    model: Model = "transformer",
    forms: tuple[Form, ...] = ("dtype", "delayed"),
    scans: tuple[bool, ...] = (False,),
    rows: tuple[int, ...] = (2,),
    length: int = 8192,
    dim: int | None = None,
    layers: int | None = None,
    remat: Literal["none", "full", "dots"] = "none",
    trials: int = 20,
    peak: float = PEAK,
) -> dict[str, Any]:
    """Time a train step by precision, with AdamW, one device; programs compile side by side.

    Large arrays of parameters are normal numbers. MFU counts the matrix products of the model by the peak in bf16,
    for FP8 too.

    Args:
      out: JSON file to write.
      model: as for `split_step`.
      forms: "dtype" is bf16 throughout, "float16" is fp16 with a scaled loss, the others are scales of FP8.
      scans: loop over blocks, or unroll them.
      rows: of a batch.
      length: bytes of a row.
      dim: width; None for that of a billion parameters.
      layers: likewise.
      remat: what blocks keep for the backward pass.
      trials: of each timing, at least 20.
      peak: FLOP/s that MFU is a share of.
    """
    import jax

    cases: list[tuple[Form, bool, int]] = [
        (form, scan, count) for scan in scans for count in rows for form in forms
    ]
    recipes = [
        with_form(
            step_recipe(model, read_mesh("data=1"), count, length, (dim, layers), remat=remat, scan=scan),
            form,
        )
        for form, scan, count in cases
    ]
    found: dict[str, Any] = {
        "model": model,
        "length": length,
        "remat": remat,
        "peak_flops": peak,
        "steps": [],
    }
    mesh = recipes[0].mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        lowered = [_lowered(recipe, mesh) for recipe in recipes]
        with ThreadPoolExecutor(4) as pool:
            compiled = list(pool.map(lambda ready: ready.lowered.compile(), lowered))
        for (form, scan, count), ready, program in zip(cases, lowered, compiled, strict=True):
            figures = {"precision": form, "scan": scan, "rows": count, **_timed(ready, program, trials, peak)}
            found["steps"].append(figures)
            save("fp8_step", out, found)
    return found


def with_form(recipe: "Recipe", form: Form) -> "Recipe":
    """Return the recipe with its products in FP8, in fp16 throughout, or as it is."""
    from jaxblt.precision import Fp8Config

    if form == "dtype":
        return recipe
    if form == "float16":
        return replace(recipe, train=replace(recipe.train, dtype=form))
    fp8 = Fp8Config(scaling=form)
    return replace(recipe, train=replace(recipe.train, precision="fp8", fp8=fp8))


@dataclass(frozen=True)
class _Ready:
    setup: Any
    batch: Any
    lowered: Any


def _lowered(recipe: "Recipe", mesh: Any) -> _Ready:
    from jaxblt.training.start.frozen import resolve
    from jaxblt.training.start.setup import make_setup, open_data, recipe_step, to_devices

    data = open_data(recipe, mesh)
    recipe, frozen = resolve(recipe, data, mesh)
    setup = make_setup(recipe, mesh, frozen)
    batch = to_devices(data.batch(0), mesh, recipe.data.batch_size)
    step: Any = recipe_step(setup)
    return _Ready(setup, batch, step.lower(setup.abstract, batch))


def _timed(ready: _Ready, program: Any, trials: int, peak: float) -> dict[str, Any]:
    import flax.linen as nn

    from experiments.benchmark.figures.programs import run_if_it_fits, time_on_devices
    from jaxblt.training.flops import count_params
    from jaxblt.training.log.report import model_cost

    def take() -> dict[str, Any]:
        held = [filled(ready.setup)]

        def run() -> Any:
            held[0], metrics = program(held[0], ready.batch)
            return metrics

        losses = [float(run()["loss"]) for _ in range(3)]
        found = time_on_devices(program, run, trials)
        cost = model_cost(ready.setup.task, nn.meta.unbox(ready.setup.whole), ready.batch.inputs.shape[1])
        patcher = ready.setup.task.patcher
        work = ready.batch.inputs.size * (
            cost.byte + (0 if patcher is None else cost.patch / patcher.patch_size)
        )
        seconds = found["seconds"]["median"]
        return {
            "parameters": count_params(ready.setup.whole)[0],
            "first_losses": losses,
            "bytes_per_second": ready.batch.inputs.size / seconds,
            "flops": work,
            "mfu": work / seconds / peak,
            **found,
        }

    return run_if_it_fits(take)


SMALL = 2**20
"""Numbers up to which an array is drawn as a run draws it."""


def filled(setup: Any) -> Any:
    """Return a state as it would begin, but with large arrays of normal numbers: drawing a billion takes minutes."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.training.start.draw_params import draw
    from jaxblt.training.start.setup import init_params

    recipe, abstract = setup.recipe, setup.abstract
    leaves, tree = jax.tree.flatten(abstract.params)
    small = [i for i, leaf in enumerate(leaves) if leaf.size <= SMALL]

    def init() -> list[Any]:
        whole = jax.tree.leaves(nn.meta.unbox(init_params(setup.task, recipe.data, recipe.train.seed)))
        return [whole[i] for i in small]

    drawn = dict(zip(small, draw(init, [leaves[i].sharding for i in small]), strict=True))
    normal = jax.jit(lambda key, shape, size: jax.random.normal(key, shape) * size, static_argnums=1)
    for i, leaf in enumerate(leaves):
        if i not in drawn:
            made = normal(jax.random.key(i), leaf.shape, math.prod(leaf.shape[:-1]) ** -0.5)
            drawn[i] = jax.device_put(made, leaf.sharding)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), replace(abstract, params=None)
    )
    return replace(zeros, params=jax.tree.unflatten(tree, [drawn[i] for i in range(len(leaves))]))
