"""Loss over a whole split: Σ nats / Σ bytes, not a mean of means."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.batch import Batch
from jaxblt.data.dataset import Dataset
from jaxblt.data.schedule import OnePass, spread
from jaxblt.data.sources import DocumentSource
from jaxblt.data.vocab import check_single_bytes, encode
from jaxblt.models.finite import explain_nonfinite
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.patching import PatcherConfig, warn_overflow
from jaxblt.random_keys import make_key
from jaxblt.training.metrics import Metrics, bits, cross_entropy, patch_counts
from jaxblt.training.objectives.label_scores import Ranks
from jaxblt.training.objectives.objectives import NextByte, Objective
from jaxblt.training.start.setup import Setup, open_data, to_devices
from jaxblt.training.state import TrainState, evaluated, gathered
from jaxblt.training.step import Task, find_entropies, predict
from jaxblt.validation import whole

ROWS = "gathered"
"""What an evaluation step hands over beside its sums; no sum has this name."""
IN_FLIGHT = 8
"""Batches handed to the devices before the oldest result is fetched."""

EvalStep = Callable[[TrainState, Any, Any], Metrics]


def target_ids(characters: str | None) -> tuple[int, ...] | None:
    """Return the ids of single-byte characters such as "ACGT"; None for None.

    Raises:
      ValueError: a character has several bytes, each of which other characters have too.
    """
    if characters is not None:
        check_single_bytes("targets", characters)
    return None if characters is None else tuple(int(i) for i in encode(characters.encode()))


def make_eval_step(
    task: Task, *, targets: tuple[int, ...] | None = None, seed: int = 0
) -> Callable[[TrainState, Batch, Any], Metrics]:
    """Make `(state, batch, index) -> sums`, jitted: the objective's sums, to be added up over a split.

    Of an objective whose figures need all rows at once (`Ranks`), "gathered" has what every row brings.

    Args:
      task: what is computed.
      targets: ids; "target_nll" and "target_weight" are of these alone, the log-loss still over all ids.
      seed: of the objective, together with the batch's index.
    """

    def eval_step(state: TrainState, batch: Batch, index: Any) -> Metrics:
        batch = task.objective(jax.random.fold_in(make_key(seed), index), batch)
        entropies = find_entropies(task, state.frozen, batch)
        batch = replace(batch, entropies=entropies)
        logits, patches, _ = predict(task, state.params, state.frozen, batch, {})
        sums: Any = task.objective.sums(logits, batch)
        if entropies is not None and patches is not None:
            # An entropy of NaN cuts no patch, and the losses would hide it: add entropies up, so that NaN shows.
            sums["entropies"] = jnp.sum(jnp.where(batch.segment_ids > 0, entropies, 0.0))
        if targets is not None:
            chosen = jnp.isin(batch.targets, jnp.asarray(targets, jnp.int32)).astype(jnp.float32)
            weights = batch.loss_mask.astype(jnp.float32) * chosen
            nll = jnp.sum(cross_entropy(logits, batch.targets) * weights)
            sums |= {"target_nll": nll, "target_weight": jnp.sum(weights)}
        if isinstance(task.objective, Ranks):
            sums[ROWS] = task.objective.rows(logits, batch)
        return sums if patches is None else {**sums, **patch_counts(patches)}

    return jax.jit(eval_step)


@dataclass
class Collected:
    """Sums and rows that steps of an evaluation found.

    Attributes:
      totals: sums over the batches, arrays as arrays.
      rows: what was gathered of each batch, by name.
      sources: the same of each of several sources alone.
    """

    totals: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    sources: "dict[str, Collected]" = field(default_factory=dict)

    def add(self, other: "Collected") -> None:
        """Take in the sums and rows of other batches."""
        for name, value in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        for name, parts in other.rows.items():
            self.rows.setdefault(name, []).extend(parts)

    def figures(self, objective: Objective) -> dict[str, float]:
        """Return the figures of what was found; see `evaluate`."""
        found = summarise(self.totals, objective)
        if isinstance(objective, Ranks):
            found |= objective.ranked({name: np.concatenate(parts) for name, parts in self.rows.items()})
        for name, part in self.sources.items():
            own = summarise(part.totals, objective)
            found |= {f"{name}/{key}": own[key] for key in (objective.headline, "bytes")}
        return found


class Validation:
    """`state -> figures` of the validation split, which is opened when it is first asked for.

    The parameters' average is scored where the state has one.

    Args:
      setup: of the run.
      source: documents to use instead of those that the recipe names.
    """

    def __init__(self, setup: Setup, source: DocumentSource | None = None) -> None:
        self.setup, self.source = setup, source
        self.found = Collected()
        self._step = make_eval_step(setup.eval_task, seed=setup.recipe.train.seed)

    @cached_property
    def data(self) -> Dataset:
        """The validation split."""
        return open_data(
            self.setup.recipe, self.setup.mesh, split="validation", mode="eval", source=self.source
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        setup = self.setup
        most = setup.recipe.train.eval_batches
        options = {"layout": setup.layout, "patcher": setup.task.patcher}
        self.found = collect(self._step, evaluated(state), self.data, setup.mesh, max_batches=most, **options)
        return self.found.figures(setup.task.objective)


def evaluate(
    step: EvalStep,
    state: TrainState,
    data: Dataset,
    mesh: Any,
    *,
    max_batches: int | None = None,
    layout: SequenceLayout = CONTIGUOUS,
    patcher: PatcherConfig | None = None,
    objective: Objective = NextByte(),
) -> dict[str, float]:
    """Score a split.

    Args:
      step: from `make_eval_step`.
      state: parameters and frozen trees.
      data: in mode "eval", where every target is scored once.
      mesh: of all devices.
      max_batches: score so many, evenly spread over the split; None for all.
      layout: in which the model wants the bytes of a row.
      patcher: of the step's task, whose slots are watched.
      objective: of the step's task, which makes figures of its sums.

    Returns:
      The objective's figures (loss in nats per byte, bits_per_byte, ...) and bytes, the sum of its weights. If the step
      has targets, their loss, bits_per_byte and bytes, with "target_" in front. If it has patches, bytes_per_patch,
      refused (boundaries) and overflow (their share). Of several sources also the objective's headline figure and the
      bytes of each, with "NAME/" in front.

    Raises:
      ValueError: no byte was scored, no batch was asked for, or a batch's sums are not finite; the message names the
        batch and the parameters that hold NaN or inf.

    Warns:
      PatchOverflowWarning: more boundaries were refused than a calibrated capacity refuses.
    """
    options = {"max_batches": max_batches, "layout": layout, "patcher": patcher}
    return collect(step, state, data, mesh, **options).figures(objective)


def collect(
    step: EvalStep,
    state: TrainState,
    data: Dataset,
    mesh: Any,
    *,
    max_batches: int | None = None,
    layout: SequenceLayout = CONTIGUOUS,
    patcher: PatcherConfig | None = None,
) -> Collected:
    """Add up the sums of a split, and gather the rows where the step does; see `evaluate`."""
    if max_batches is not None:
        whole("max_batches", max_batches, least=1, why=": None takes all")
    found = Collected()
    for name, steps in source_steps(data, max_batches).items():
        part = _collected(step, state, data, mesh, steps, layout)
        found.add(part)
        if name:
            found.sources[name] = part
    if patcher is not None and jax.process_index() == 0:
        refused, wanted = found.totals["refused"], found.totals["patches"] + found.totals["refused"]
        warn_overflow(refused, wanted, capacity=patcher.slots, block_size=patcher.block_size)
    return found


def source_steps(data: Dataset, most: int | None) -> dict[str, list[int]]:
    """Choose the batches to score of each source, `most` in all and at least one of each; {"": ...} for one source.

    In evaluation a source is a bucket of its own, and buckets follow each other.
    """
    if not data.source_names:
        return {"": list(range(most or 0)) if data.num_batches is None else spread(data.num_batches, most)}
    assert isinstance(data.schedule, OnePass)
    counts, first, found = data.schedule.batches, 0, {}
    for i, (name, count) in enumerate(zip(data.source_names, counts, strict=True)):
        share = None if most is None else max(most // len(counts) + (i < most % len(counts)), 1)
        found[name] = [first + step for step in spread(count, share)]
        first += count
    return found


def _collected(
    step: EvalStep, state: TrainState, data: Dataset, mesh: Any, steps: list[int], layout: SequenceLayout
) -> Collected:
    """Add up what some batches come to."""
    found = Collected()
    waiting: list[tuple[int, Metrics]] = []
    for index in steps:
        on_devices = to_devices(data.batch(index), mesh, data.config.batch_size, layout)
        waiting.append((index, step(state, on_devices, np.int32(index))))
        if len(waiting) >= IN_FLIGHT:
            _add(found, *waiting.pop(0), state)
    for index, sums in waiting:
        _add(found, index, sums, state)
    return found


def _add(found: Collected, index: int, sums: Any, state: TrainState) -> None:
    """Add up in float64: fp32 would lose single bytes beyond 16 million."""
    for name, values in sums.pop(ROWS, {}).items():
        found.rows.setdefault(name, []).append(gathered(values))
    for name, value in ((name, gathered(values)) for name, values in sums.items()):
        if not np.isfinite(value).all():
            frozen = {name: tree.params for name, tree in state.frozen.items()}
            params = {"model": state.params, **frozen}
            raise ValueError(
                f"batch {index} of the split: the sum of {name} is {value}; {explain_nonfinite(params)}"
            )
        found.totals[name] = found.totals.get(name, 0.0) + np.float64(value)


def summarise(totals: dict[str, Any], objective: Objective = NextByte()) -> dict[str, float]:
    """Make figures of sums over a split; see `evaluate`."""
    found = {"bytes": _scored(totals, "")}
    found |= {name: float(value) for name, value in objective.figures(totals).items()}
    if "target_nll" in totals:
        loss = float(totals["target_nll"]) / _scored(totals, "target_")
        found |= {
            "target_loss": loss,
            "target_bits_per_byte": bits(loss),
            "target_bytes": float(totals["target_weight"]),
        }
    if "patches" in totals:
        patches, refused = float(totals["patches"]), float(totals["refused"])
        found["bytes_per_patch"] = float(totals["patched_bytes"]) / max(patches, 1.0)
        found["refused"] = refused
        found["overflow"] = refused / max(patches + refused, 1.0)
    return found


def _scored(totals: dict[str, Any], prefix: str) -> float:
    if totals[f"{prefix}weight"] == 0:
        kind = "target" if prefix else "scored"
        raise ValueError(f"the split holds no {kind} byte: check the data, its `scored` and the targets")
    return float(totals[f"{prefix}weight"])
