"""Where a train step's time goes, by kernel: python -m experiments.benchmark step_kernels --out FILE."""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from experiments.benchmark.figures.saved import RECORD, save
from experiments.benchmark.splitting.split_step import Model, step_recipe
from jaxblt.validation import whole

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxblt.training.recipe import Recipe
    from jaxblt.training.start.timed_step import Ready

Form = Literal["dtype", "delayed", "current", "attention", "float16"]
PEAK = 989e12
"""Dense bf16 FLOP/s of an H200's datasheet."""
TRACED = 5
"""Steps in a trace."""


def step_kernels(
    out: str,
    model: Model | Literal["books"] = "transformer",
    form: Form = "dtype",
    rows: int = 2,
    length: int = 8192,
    dim: int | None = None,
    layers: int | None = None,
    remat: Literal["none", "full", "dots"] = "none",
    scan: bool = False,
    trials: int = 20,
    peak: float = PEAK,
    slots: int | None = None,
) -> dict[str, Any]:
    """Time a train step, and add up its device time by kernel, by kind of kernel and by pass.

    The step is timed as a run compiles it. The trace is of the same step with kernels launched one by one. Kernels that
    differ by their layer count together; those of less than 0.2 % are told by kind only.

    Args:
      out: JSON file to write.
      model: as for `split_step`; or the recipe `books` on the embedded book, without dropout in its encoder, with a
        head of its own and a drawn entropy model. Of the options behind it only `rows`, `length`, `trials`, `peak`
        and `slots` count then.
      form: "dtype" is bf16 throughout, "float16" is fp16 with a scaled loss, the others are scales of FP8, and
        "attention" is "delayed" with attention in FP8 too.
      rows: of a batch.
      length: bytes of a row.
      dim: width; None for that of a billion parameters.
      layers: likewise.
      remat: what blocks keep for the backward pass.
      scan: loop over blocks, or unroll them.
      trials: of the timing, at least 20.
      peak: FLOP/s that MFU is a share of.
      slots: for patches, in a block of `books`; None for those of its run in `books.json`.

    Raises:
      ValueError: `rows` or `length` is below 1, or there are fewer than 20 trials.
    """
    import jax

    from jaxblt.parallel import MeshConfig

    for name, value in (("--rows", rows), ("--length", length)):
        whole(name, value, least=1)
    mesh = MeshConfig(data=1).build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        if model == "books":
            ready = _books(rows, length, mesh, slots)
        else:
            from jaxblt.training.start.timed_step import prepare

            recipe = step_recipe(
                model, MeshConfig(data=1), rows, length, (dim, layers), remat=remat, scan=scan
            )
            ready = prepare(with_form(recipe, form), mesh)
        found = {
            "model": model,
            "precision": form,
            "rows": rows,
            "length": length,
            "remat": remat,
            "scan": scan,
        }
        if ready.setup.task.patcher is not None:
            found["slots"] = ready.setup.task.patcher.slots
        found |= _timed(ready, trials, peak)
    save("step_kernels", out, found)
    return found


def with_form(recipe: "Recipe", form: Form) -> "Recipe":
    """Return the recipe with its products in FP8, or attention too, in fp16 throughout, or as it is."""
    from jaxblt.precision import Fp8Config

    if form == "dtype":
        return recipe
    if form == "float16":
        return replace(recipe, train=replace(recipe.train, dtype=form))
    attends = form == "attention"
    fp8 = Fp8Config(scaling="delayed" if attends else form, attention=attends)
    return replace(recipe, train=replace(recipe.train, precision="fp8", fp8=fp8))


def _books(rows: int, length: int, mesh: "Mesh", slots: int | None) -> "Ready":
    import flax.linen as nn
    import jax

    from jaxblt import recipes
    from jaxblt.training.start.setup import init_params, make_task
    from jaxblt.training.start.timed_step import prepare
    from jaxblt.training.state import freeze_entropy

    base, entropy = recipes.get("books"), recipes.get("books_entropy")
    assert base.patcher is not None
    if slots is None:
        # Take them from a run: entropies of a drawn model would calibrate twice as many
        slots = json.loads((RECORD / "books.json").read_text("utf-8"))["evaluation"]["capacity"]
    book = {
        "batch_size": rows,
        "seq_len": length,
        "paths": (),
        "sample": "book",
        "split": "position",
        "validation_names": (),
        "test_names": (),
    }
    data, task = replace(base.data, **book), make_task(entropy)
    draw = jax.jit(lambda: nn.meta.unbox(init_params(task, data, 0)))
    recipe = replace(
        base,
        data=data,
        model=replace(base.model, encoder=replace(base.model.encoder, dropout=0.0), tie_head=False),
        patcher=replace(base.patcher, capacity=slots),
        entropy_run=None,
        entropy_model=entropy.model,
    )
    return prepare(recipe, mesh, frozen=freeze_entropy(draw()))


def _timed(ready: "Ready", trials: int, peak: float) -> dict[str, Any]:
    import jax

    from experiments.benchmark.figures.kernel_table import told
    from experiments.benchmark.figures.programs import SINGLY, time_on_devices
    from jaxblt.profiling import kernel_totals, op_totals, trace
    from jaxblt.training.flops import count_params
    from pallas_kernels.runtime import alone

    lowered = cast(Any, ready.step()).lower(ready.state, ready.batch)
    with ThreadPoolExecutor(2) as pool:
        # Launch one by one what is traced: a trace does not tell the kernels of a command buffer
        fast, single = pool.map(lambda options: lowered.compile(compiler_options=options), (None, SINGLY))
    held = [ready.state]

    def run(program: Any) -> Any:
        held[0], metrics = program(held[0], ready.batch)
        return metrics

    losses = [float(run(fast)["loss"]) for _ in range(3)]
    found = {"parameters": count_params(ready.setup.whole)[0], "first_losses": losses}
    found |= time_on_devices(fast, lambda: run(fast), trials)
    seconds, work = found["seconds"]["median"], work_of(ready, float(run(fast).get("bytes_per_patch", 1.0)))
    found |= {"flops": work, "mfu": work / seconds / peak, "peak_flops": peak}
    found["bytes_per_second"] = ready.num_bytes / seconds
    jax.block_until_ready(run(single))
    with tempfile.TemporaryDirectory() as folder:
        with alone(), trace(folder):
            for _ in range(TRACED):
                jax.block_until_ready(run(single))
        rows, launched = kernel_totals(folder, single.as_text() or ""), op_totals(folder)
    return found | told(rows, launched, TRACED)


def work_of(ready: "Ready", bytes_per_patch: float) -> float:
    """Return the FLOPs of a step's matrix products, both passes."""
    import flax.linen as nn

    from jaxblt.training.log.report import model_cost

    cost = model_cost(ready.setup.task, nn.meta.unbox(ready.setup.whole), ready.batch.inputs.shape[1])
    patches = 0 if ready.setup.task.patcher is None else cost.patch / bytes_per_patch
    return ready.num_bytes * (cost.byte + patches)
