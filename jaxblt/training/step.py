"""One training step, as a pure function of state and batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxblt.adapters import tell_documents
from jaxblt.adapters.code.draw import POLICY
from jaxblt.data.batch import Batch
from jaxblt.data.vocab import PAD
from jaxblt.layers import FP8
from jaxblt.models.blt import ROUTER
from jaxblt.patching import (
    PatcherConfig,
    byte_entropies,
    entropies_in_windows,
    init_contexts,
    stream_entropies,
)
from jaxblt.patching.learned.cut_counts import count_cuts
from jaxblt.patching.learned.router import COUNTED
from jaxblt.patching.patches import Patches
from jaxblt.precision.config import Fp8Config
from jaxblt.precision.loss_scale import LossScaleConfig, next_loss_scale
from jaxblt.precision.scaling import AMAX, LOSS
from jaxblt.precision.sites import in_fp8, next_amax
from jaxblt.random_keys import make_key
from jaxblt.show import show
from jaxblt.side_outputs import SIDE_OUTPUTS, next_params, with_next
from jaxblt.training.experimental.hybrid import Hybrid, combined, draw, hybrid_figures, routed_parts
from jaxblt.training.metrics import (
    Metrics,
    patch_counts,
    patch_metrics,
    sown_losses,
    sown_metrics,
)
from jaxblt.training.metrics import layer_norms as norms_of_layers
from jaxblt.training.objectives.objectives import NextByte, Objective
from jaxblt.training.objectives.reference import Reference, divergence, every_nth
from jaxblt.training.optimisers.adamw import Bounded
from jaxblt.training.optimisers.norm import global_norm
from jaxblt.training.state import ENTROPY, Frozen, TrainState, averaged, still, whole_params, widen
from pallas_kernels.runtime import current_device


@dataclass(frozen=True)
class Task:
    """The static parts of what a step computes.

    Attributes:
      model: a `jaxblt.models.LanguageModel`; it closes its patches itself, by its own patcher.
      objective: what it predicts.
      entropy_model: byte model whose entropies cut the patches where a batch brings none.
      packed: rows may hold several documents or padding. False promises one full document a row; the model is then
        given no segment ids, which spares it the masks.
      reference: a second model that predictions are held close to in training; None for none.
      hybrid: weights of the loss's parts, and what trains routers besides; None for the objective's loss.
      fp8: how products run in FP8 where the step trains; None for none. Evaluations compute in the model's dtype.
      loss_scale: of a model in fp16; None for no scale.
    """

    model: Any
    objective: Objective = NextByte()
    entropy_model: nn.Module | None = None
    packed: bool = True
    reference: Reference | None = None
    hybrid: Hybrid | None = None
    fp8: Fp8Config | None = None
    loss_scale: LossScaleConfig | None = None

    __repr__ = show

    @property
    def patcher(self) -> PatcherConfig | None:
        """The rule that makes patches of bytes; None for a model without."""
        return self.model.patcher

    def cut_by(self, patcher: PatcherConfig | None) -> "Task":
        """Return the task of the same model with another patcher."""
        return self if patcher == self.patcher else replace(self, model=self.model.clone(patcher=patcher))


def find_entropies(task: Task, frozen: Mapping[str, Frozen], batch: Batch) -> Float[Array, "B T"] | None:
    """Return the entropies that cut the batch, its own or the frozen model's; None if the patcher reads none.

    Raises:
      ValueError: the patcher needs entropies and there is neither an entropy model nor entropies in the batch.
    """
    if task.patcher is None:
        return None
    if not task.patcher.needs_entropies or batch.entropies is not None:
        return batch.entropies
    if ENTROPY not in frozen or task.entropy_model is None:
        raise ValueError(
            f"patching mode {task.patcher.mode!r} needs entropies: set entropy_run in the recipe, or precompute "
            "entropies into the data, or patch by 'static' or 'space'"
        )
    params = frozen[ENTROPY].params
    if batch.history is not None:
        return _entropies_after_history(task, params, batch, batch.history)
    context = task.patcher.entropy_context
    if context is not None and batch.inputs.shape[1] > context:
        return _long_entropies(task.entropy_model, params, batch, context)
    return byte_entropies(
        entropy_apply(task.entropy_model),
        params,
        batch.inputs,
        segment_ids=_segments(task, batch),
        positions=batch.positions if task.packed else None,
    )


def _entropies_after_history(
    task: Task, params: Any, batch: Batch, history: Int[Array, "B W"]
) -> Float[Array, "B T"]:
    """Return entropies of rows of one document, as in its middle: the bytes before a row are read as well."""
    assert task.patcher is not None
    assert task.entropy_model is not None
    context, (rows, length) = task.patcher.entropy_context, batch.inputs.shape
    absent = jnp.sum(history == PAD, 1, dtype=jnp.int32)[:, None]
    ids = jnp.concatenate([history, batch.inputs[:, 1:], jnp.full((rows, 1), PAD, jnp.int32)], 1)
    last = ids.shape[1] - 1
    # documents to the front; what then stands behind a row no byte of it sees
    ids = jnp.take_along_axis(ids, jnp.minimum(jnp.arange(last + 1)[None] + absent, last), 1)
    entropies = partial(byte_entropies, entropy_apply(task.entropy_model), params)
    found = entropies(ids) if context is None else entropies_in_windows(entropies, ids, context=context)
    first = jnp.maximum(history.shape[1] - 1 - absent, 0)
    found = jnp.take_along_axis(found, first + jnp.arange(length)[None], 1)
    return jnp.where(batch.segment_ids > 0, found, 0.0)


def _long_entropies(model: Any, params: Any, batch: Batch, context: int) -> Float[Array, "B T"]:
    """Return entropies of rows longer than the entropy model may see: half a context at a time.

    Raises:
      ValueError: the model has no streaming form.
    """
    if not hasattr(model, "stream"):
        raise ValueError(
            f"rows of {batch.inputs.shape[1]} bytes are longer than patcher.entropy_context = {context}, and entropy "
            f"model {type(model).__name__} cannot stream: use rows of at most {context} bytes, or a ByteLM"
        )

    def stream(params: Any, ids: Any, state: Any, *, segment_ids: Any) -> Any:
        return model.apply({"params": widen(params)}, ids, state, segment_ids=segment_ids, method="stream")

    def start(rows: int, capacity: int) -> Any:
        return model.init_state(rows, num_bytes=capacity)

    rows, length = batch.inputs.shape
    state = init_contexts(start, rows, length, context)
    return stream_entropies(
        stream,
        params,
        batch.inputs,
        state,
        segment_ids=batch.segment_ids,
        chunk=context // 2,
        context=context,
    )


def predict(
    task: Task,
    params: Any,
    frozen: Mapping[str, Frozen],
    batch: Batch,
    rngs: Mapping[str, PRNGKeyArray],
    *,
    experts: Any = None,
    amax: Any = None,
    counted: Any = None,
    collections: Sequence[str] = SIDE_OUTPUTS,
    fp8: Fp8Config | None = None,
) -> tuple[Any, Patches | None, Any]:
    """Return logits ([B, T, V], [B, C] of rows, or `TaskAnswers`), patches, and what modules sowed.

    Dropout is on iff `rngs` has its key. A policy takes `experts`, if there are any (`jaxblt.adapters.Draw`). Products
    in FP8, as `fp8` says, read their scales from `amax`; those of the entropy model are never in FP8. The router's loss
    takes F of a whole batch from `counted`.
    """
    routed = None if counted is None else {ROUTER: counted}
    given = ((POLICY, experts), (FP8, amax), (COUNTED, routed))
    given = {name: value for name, value in given if value is not None}
    with tell_documents(batch.documents, None if task.patcher is None else task.patcher.block_size):
        entropies = find_entropies(task, frozen, batch)
        with in_fp8(fp8):
            (logits, patches), side = task.model.apply(
                {"params": whole_params(params, frozen), **given},
                batch.inputs,
                segment_ids=_segments(task, batch),
                positions=batch.positions if task.packed else None,
                entropies=entropies,
                rngs=rngs,
                mutable=collections,
            )
    return logits, patches, side


def entropy_apply(model: nn.Module) -> Callable[..., tuple[Float[Array, "B T V"], Any]]:
    """Make `model.apply` of an entropy model with bfloat16 parameters: (params, ids, ...) -> (logits, None)."""

    def apply(params: Any, ids: Any, **options: Any) -> Any:
        # norms compute in fp32 and take no bfloat16 scale under strict dtype promotion
        return model.apply({"params": widen(params)}, ids, **options)

    return apply


def _segments(task: Task, batch: Batch) -> Any:
    return batch.segment_ids if task.packed else None


def make_train_step(
    task: Task,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule | None = None,
    accumulate: int = 1,
    seed: int = 0,
    max_skips: int = 5,
    ema: float | None = None,
    layer_norms: bool = False,
    shardings: Any = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Make `(state, batch) -> (state, metrics)`, jitted; the state's memory is donated.

    The loss is the objective's, Σ weight·loss / Σ weight over the whole batch, plus sown losses. A step whose loss,
    gradient or update is not finite, or that scores nothing, changes neither parameters nor optimiser.
    After `max_skips` of them in a row every further step is skipped too, so that a host that looks now and then cannot
    miss it.

    Args:
      task: what is computed.
      optimizer: of the parameters.
      schedule: its learning rate by update, to report.
      accumulate: micro-batches run one after the other; rows must divide by it.
      seed: of objective and dropout.
      max_skips: see above.
      ema: decay of the average of the parameters, for a state that has one; a skipped step does not count.
      layer_norms: report the gradient's norm by layer too (`metrics.layer_norms`).
      shardings: of the state, kept from step to step; None leaves them to the compiler.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        ask, drop = jax.random.split(jax.random.fold_in(make_key(seed), state.step))
        batch = task.objective(ask, batch)
        weight = task.objective.weight(batch)
        grads, observed, sums, (side, found) = _gradients(task, state, batch, weight, drop, accumulate)
        loss = sums["loss"] / weight
        grad_norm = global_norm(grads)
        finite = jnp.isfinite(loss + sums["sown_loss"]) & jnp.isfinite(grad_norm)
        params, updates, opt_state, sound = _updates(optimizer, schedule, grads, state, finite)
        good = sound & (state.skipped_in_a_row < max_skips)
        updates = _zero_unless(good, updates)
        bad = (~good).astype(jnp.int32)
        scaling, scaled = _next_scaling(task, state.scaling, observed, finite)
        after = replace(
            state,
            step=state.step + 1,
            params=with_next(optax.apply_updates(params, updates), found, good),
            opt_state=jax.tree.map(lambda new, old: jnp.where(good, new, old), opt_state, state.opt_state),
            skipped=state.skipped + bad,
            skipped_in_a_row=jnp.where(
                scaled & ~finite, state.skipped_in_a_row, (state.skipped_in_a_row + 1) * bad
            ),
            scaling=scaling,
        )
        if ema is not None:
            average = averaged(state.ema, after.params, ema, after.step - after.skipped)
            average = jax.tree.map(lambda new, old: jnp.where(good, new, old), average, state.ema)
            after = replace(after, ema=average)
        metrics = {
            **_figures(task, sums),
            **side,
            "grad_norm": grad_norm,
            **_norms(state.params, grads, updates, by_layer=layer_norms),
            "skipped": after.skipped.astype(jnp.float32),
            "skipped_in_a_row": after.skipped_in_a_row.astype(jnp.float32),
        }
        if state.scaling is not None and LOSS in state.scaling:
            metrics["loss_scale"] = state.scaling[LOSS]["scale"]
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step - state.skipped), jnp.float32)
        return after, metrics

    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=None if shardings is None else (shardings, None),
        compiler_options=compiler_options(),
    )


def _norms(params: Any, grads: Any, updates: Any, *, by_layer: bool) -> Metrics:
    """Return norms of parameters and updates, and of the gradient of the router and, if asked, of layers."""
    found = {"param_norm": global_norm(params), "update_norm": global_norm(updates)}
    if by_layer:
        found |= norms_of_layers(grads)
    if ROUTER in grads:
        found[f"{ROUTER}/grad_norm"] = global_norm(grads[ROUTER])
    return found


COMBINED_BYTES = 2**28
"""Up to which the gathers and sums of parameters are made together."""


def compiler_options() -> dict[str, Any] | None:
    """Return what XLA is told of a train step for the device that jit compiles for; None for nothing.

    On GPUs it leaves matrix products to cuBLAS: the step of `books` then runs at 1,240 KB/s instead of 1,189 on an H200
    (jax 0.11.2, 150 and 100 steps, no file). It also joins exchanges of parameters, each of which costs a start on
    every device: with XLA's 30 MB a step of 1.2 B parameters over `fsdp=2` took 328 ms, with these 324, and 315 on one
    device (H200, 2 rows of 8,192 bytes a device). It writes fused kernels in one way instead of compiling and timing
    several: the step of `books` then compiles in 34 s instead of 47 and takes 57.2 ms instead of 57.4 (H200, jax
    0.11.2, 40 steps each, no file).
    """
    if current_device().platform != "gpu":
        return None
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    joined = {f"xla_gpu_{kind}_combine_threshold_bytes": COMBINED_BYTES for kind in kinds}
    untried = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_experimental_enable_fusion_autotuner": False}
    return {**untried, **joined}


def _updates(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule | None,
    grads: Any,
    state: TrainState,
    finite: Bool[Array, ""],
) -> tuple[Any, Any, Any, Bool[Array, ""]]:
    """Return the parameters to update, updates, the optimiser's state, and whether gradients and updates are finite.

    Updates of a bounded optimiser are not looked at: they would be written out before the first is applied.
    """
    # Keep the norm of parameters out of the update's pass, which XLA could not do in place then
    params, finite = jax.lax.optimization_barrier((state.params, finite))
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    if isinstance(optimizer, Bounded) and schedule is not None:
        return params, updates, opt_state, finite & jnp.isfinite(schedule(state.step - state.skipped))
    return params, updates, opt_state, finite & _all_finite(updates)


def _zero_unless(good: Bool[Array, ""], updates: Any) -> Any:
    """Return the updates of a good step, otherwise zeros."""
    # Hide the zero: XLA would write an array of them, as the gradient of a table begins with the same zeros
    zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
    return jax.tree.map(lambda u: jnp.where(good, u, zero.astype(u.dtype)), updates)


def _all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether all is finite, element by element: a norm would overflow where every element is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _gradients(
    task: Task, state: TrainState, batch: Batch, weight: Float[Array, ""], key: PRNGKeyArray, accumulate: int
) -> tuple[Any, Any, Metrics, tuple[Metrics, Any]]:
    """Return the gradient of the batch's loss, what FP8 products observed, sums, sown metrics and what
    modules reported for the next step.

    Micro-batches are added up and divided once. The loss of fp16 is scaled before its gradient is taken, and divided
    by its weight there: sums over a batch would overflow.
    """
    scaling = state.scaling or {}
    factor = scaling[LOSS]["scale"] / weight if LOSS in scaling else None

    def micro(
        given: Any, index: Any, rows: Batch, counted: Any = None
    ) -> tuple[Float[Array, ""], tuple[Metrics, Any]]:
        params, amax = given
        own = jax.random.fold_in(key, index)
        run = _runner(task, state.frozen, rows, {"dropout": own}, amax, counted)
        drawn = draw(task.hybrid, run, params, state.opt_state, jax.random.fold_in(own, 1))
        logits, patches, side = run(params, experts=None if drawn is None else drawn.experts)
        objective = task.objective
        sown = sown_losses(side, objective.answered(logits, rows)) / accumulate
        sums = objective.sums(logits, rows) | {"sown_loss": sown}
        counts = {} if patches is None else patch_counts(patches)
        parts = {"language": sums["loss"]}
        if task.reference is not None:
            counts["reference_kl"] = _from_reference(task, task.reference, state.frozen, logits, rows)
            parts["reference"] = jnp.float32(task.reference.weight) * counts["reference_kl"]
        if task.hybrid is not None:
            more, found = routed_parts(task.hybrid, run, params, logits, drawn, rows)
            parts, counts = parts | more, counts | found
        total = combined(task.hybrid, parts, state.step) + sums["sown_loss"] * weight
        return total if factor is None else total * factor, (
            sums | counts,
            (sown_metrics(side), next_params(side)),
        )

    gradient, given = jax.grad(micro, has_aux=True), (state.params, scaling.get(AMAX))
    if accumulate == 1:
        (grads, observed), (sums, side) = gradient(given, jnp.int32(0), batch)
    else:

        def add(total: Any, item: tuple[Any, Batch, Any]) -> tuple[Any, tuple[Metrics, Any]]:
            found, aux = gradient(given, *item)
            both = (jax.tree.map(f, *trees) for f, *trees in zip(_TOGETHER, total, found, strict=True))
            return tuple(both), aux

        numbers, parts = jnp.arange(accumulate, dtype=jnp.int32), split_rows(batch, accumulate)
        items = (numbers, parts, _counted(task, state, numbers, parts, key))
        (grads, observed), (sums, side) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, given), items)
        sums = {name: jnp.sum(values, 0) for name, values in sums.items()}
        side = jax.tree.map(lambda values: jnp.mean(values, 0), side)
    divisor = weight if factor is None else scaling[LOSS]["scale"]
    return jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads), observed, sums, side


def _counted(task: Task, state: TrainState, numbers: Int[Array, "A"], parts: Batch, key: PRNGKeyArray) -> Any:
    """Return what `count_cuts` finds in the micro-batches of a model with a router; None for another model."""
    if getattr(getattr(task.model, "config", None), ROUTER, None) is None:
        return None

    def route(number: Any, rows: Batch) -> Float[Array, "B T"]:
        params = {"params": whole_params(state.params, state.frozen)}
        given = {"segment_ids": _segments(task, rows), "entropies": find_entropies(task, state.frozen, rows)}
        # The rng of `micro`, so that dropout leaves the same units
        rngs = {"dropout": jax.random.fold_in(key, number)}
        return task.model.apply(params, rows.inputs, **given, rngs=rngs, method="route")[0]

    return count_cuts(route, numbers, parts)


_TOGETHER = (jnp.add, jnp.maximum)
"""How micro-batches join their gradients, and the largest entries that they observed."""


def _next_scaling(
    task: Task, scaling: dict[str, Any] | None, observed: Any, finite: Bool[Array, ""]
) -> tuple[dict[str, Any] | None, Bool[Array, ""]]:
    """Return what low precision remembers after a step, and whether a scale of the loss above 1 was in use.

    A step that is skipped changes scales all the same: a smaller one is how the next may succeed.
    """
    if scaling is None:
        return None, jnp.zeros((), bool)
    after, scaled = dict(scaling), jnp.zeros((), bool)
    if AMAX in scaling:
        after[AMAX] = next_amax(scaling[AMAX], observed)
    if task.loss_scale is not None:
        after[LOSS] = next_loss_scale(scaling[LOSS], finite, task.loss_scale.every)
        scaled = scaling[LOSS]["scale"] > 1
    return after, scaled


def _runner(
    task: Task,
    frozen: Mapping[str, Frozen],
    rows: Batch,
    always: dict[str, PRNGKeyArray],
    amax: Any,
    counted: Any = None,
) -> Any:
    """Make passes of a batch's rows (`experimental.hybrid.Run`); all of them have the rngs `always`."""

    def run(
        params: Any,
        *,
        model: Any = None,
        rngs: Mapping[str, PRNGKeyArray] = MappingProxyType({}),
        **options: Any,
    ) -> Any:
        own = task if model is None else replace(task, model=model)
        given = {"amax": amax, "counted": counted, "fp8": task.fp8} | options
        return predict(own, params, frozen, rows, {**always, **rngs}, **given)

    return run


def _from_reference(
    task: Task,
    reference: Reference,
    frozen: Mapping[str, Frozen],
    logits: Float[Array, "B T V"],
    rows: Batch,
) -> Float[Array, ""]:
    """Return the divergence from the reference, summed over the rows that are compared and scaled to all."""
    logits, rows = every_nth((logits, rows), reference.every)
    with tell_documents(rows.documents, None if task.patcher is None else task.patcher.block_size):
        wanted, _ = reference.model.apply(
            {"params": still(frozen[reference.tree].params)},
            rows.inputs,
            segment_ids=_segments(task, rows),
            positions=rows.positions if task.packed else None,
            entropies=find_entropies(task, frozen, rows),
        )
    return divergence(logits, wanted, rows) * reference.every


def split_rows(batch: Batch, parts: int) -> Batch:
    """Split [B, ...] into [parts, B/parts, ...], part i holding rows i, i + parts, ...

    Taking every parts-th row leaves each device with rows that it already has.

    Raises:
      ValueError: the rows do not divide.
    """
    rows = batch.inputs.shape[0]
    if rows % parts:
        raise ValueError(
            f"a batch of {rows} rows does not divide into {parts} micro-batches: change train.accumulate"
        )
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(rows // parts, parts, *x.shape[1:]), 0, 1), batch)


def _figures(task: Task, sums: Metrics) -> Metrics:
    """Return the objective's figures, and the patches' where there are patches."""
    found = task.objective.figures(sums) | {"sown_loss": sums["sown_loss"], "scored_bytes": sums["weight"]}
    if "reference_kl" in sums:
        found["reference_kl"] = sums["reference_kl"] / sums["weight"]
    found |= hybrid_figures(sums)
    return {**found, **(patch_metrics(sums) if "patches" in sums else {})}
