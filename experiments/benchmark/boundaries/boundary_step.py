"""Time of a step by how patches are cut: python -m experiments.benchmark boundary_step --out FILE."""

import tempfile
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

from experiments.benchmark.boundaries.boundary_books import Arm
from jaxblt.validation import number, whole

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxblt.training.recipe import Recipe
    from jaxblt.training.start.timed_step import Ready

PARTS = {
    "latent": r"/latent/",
    "level": r"/level/",
    "encoder": r"/encoder/",
    "decoder": r"/decoder/",
    "router": r"/router/",
    "head": r"/head/",
    "embedding": r"/embedding/",
    "positions": r"/position/",
    "un-merge": r"_read_patches/",
    "pooling": r"/up[./]",
    "smoothing": r"_latent_forward/",
}
"""The parts of a byte-patched model by their paths in the compiled program, inner ones first."""
SINGLY = {"xla_gpu_enable_command_buffer": ""}
"""Options of the compiler that launch kernels one by one: a trace does not tell the parts of a command buffer."""
NEW_BYTES = 64
"""Bytes of a row that are decoded one by one."""


def boundary_step(
    out: str,
    arms: tuple[Arm, ...] = ("learned", "learned_levels", "learned_attention", "entropy", "static"),
    recipe: str = "books",
    bytes_per_patch: float = 5.0,
    steps: int = 20,
) -> dict[str, Any]:
    """Time a recipe's train step under several ways to cut patches of one mean length, each part of it, and decoding.

    Kernels are launched one by one, for the trace's sake. Rows are of the embedded book. Parameters are as they are
    drawn, those of an entropy model too, and routers and thresholds are calibrated, so that every arm cuts patches of
    the same mean length. Decoding is of one row, whose bytes are drawn.

    Args:
      out: file for the figures as JSON, written anew after each arm.
      arms: ways to cut.
      recipe: its name; a byte-patched model.
      bytes_per_patch: mean length.
      steps: that are timed, and half as many more in a trace.

    Raises:
      ValueError: a number is out of range.
    """
    import jax

    from experiments.benchmark.figures.saved import save
    from jaxblt import recipes
    from pallas_kernels.runtime import MIN_TRIALS

    whole("--steps", steps, least=MIN_TRIALS)
    number("--bytes-per-patch", bytes_per_patch, above=1)
    base = replace(recipes.get(recipe), bytes_per_patch=bytes_per_patch)
    figures: dict[str, Any] = {
        "recipe": recipe,
        "step_bytes": base.data.batch_size * base.data.seq_len,
        "arms": {},
    }
    mesh = base.mesh.build(jax.devices()[:1])
    for arm in dict.fromkeys(arms):
        with jax.set_mesh(mesh):
            ready = begun(base, arm, mesh)
            # Decode first: the step takes the state's arrays
            figures["arms"][arm] = {"decoding": decoded(ready, steps)} | timed(ready, steps)
        save("boundary_step", out, figures)
    return figures


def begun(base: "Recipe", arm: Arm, mesh: "Mesh") -> "Ready":
    """Return an arm of the recipe on the embedded book, ready to train; an entropy model is drawn if it reads one."""
    import flax.linen as nn
    import jax

    from experiments.benchmark.boundaries.boundary_books import arm_of
    from jaxblt import recipes
    from jaxblt.training.start.setup import init_params, make_task
    from jaxblt.training.start.timed_step import prepare
    from jaxblt.training.state import freeze_entropy

    book = {"paths": (), "sample": "book", "split": "position", "validation_names": (), "test_names": ()}
    data, entropy = replace(base.data, **book), recipes.get(f"{base.name}_entropy")
    own, frozen = arm_of(replace(base, data=data), arm), None
    if arm == "entropy":
        task = make_task(entropy)
        draw = jax.jit(lambda: nn.meta.unbox(init_params(task, data, 0)))
        own, frozen = replace(own, entropy_run=None, entropy_model=entropy.model), freeze_entropy(draw())
    return prepare(own, mesh, frozen=frozen)


def timed(ready: "Ready", steps: int) -> dict[str, Any]:
    """Return a step's time on the host, its device time by part, and what its patches are like."""
    import jax

    from jaxblt.profiling import scope_totals, trace
    from pallas_kernels.runtime import measure

    step, traced = cast(Any, ready.step()), steps // 2
    compiled = step.lower(ready.state, ready.batch).compile(compiler_options=SINGLY)
    held = [compiled(ready.state, ready.batch)]

    def run() -> Any:
        held[0] = compiled(held[0][0], ready.batch)
        return held[0][1]

    told = jax.device_get(held[0][1])
    seconds = asdict(measure(run, name="train step", trials=steps, warmup=1, method="host").summary)
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(traced):
                jax.block_until_ready(run())
        parts = scope_totals(folder, compiled.as_text() or "", PARTS)
    total = sum(parts.values()) / traced
    return {
        "seconds": seconds,
        "bytes_per_patch": float(told["bytes_per_patch"]),
        "device_seconds": total,
        "device_share_of_step": total / seconds["median"],
        "shares": {name: part / traced / total for name, part in parts.items()},
    }


def decoded(ready: "Ready", trials: int) -> dict[str, Any]:
    """Return the time of a decoded byte of one row, on the host."""
    from experiments.benchmark.models.written_bytes import Written
    from jaxblt.inference import Decoder
    from jaxblt.training.state import ENTROPY, widen

    recipe, frozen = ready.setup.recipe, ready.state.frozen
    decoder = Decoder(recipe.model, recipe.patcher, recipe.entropy_model, recipe.train.compute_dtype)
    entropy = widen(frozen[ENTROPY].params) if ENTROPY in frozen else None
    params = {"model": ready.state.params, "entropy": entropy}
    written = Written(decoder, params, 1, NEW_BYTES)
    compiled = written.write.lower(*written.arrays).compile()
    median = written.time(compiled, trials).summary.median
    return {"bytes": NEW_BYTES, "seconds": median, "ms_a_byte": 1e3 * median / NEW_BYTES}
