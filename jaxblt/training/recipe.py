"""A recipe: everything that defines a training run, as one frozen dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from jaxblt.adapters import Draw
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.task_data import RowsConfig
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.models.blt import BLTConfig
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.classifier import ByteClassifierConfig
from jaxblt.models.label_head import LabelHeadConfig
from jaxblt.models.task_heads import TaskHeadsConfig
from jaxblt.parallel.layout import CONTIGUOUS, SequenceLayout
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching.config import PatcherConfig
from jaxblt.show import show
from jaxblt.training.best import check_followed
from jaxblt.training.objectives.objectives import (
    Classify,
    ClassifyChain,
    ClassifyPositions,
    MultiTask,
    NextByte,
    Objective,
    Regress,
)
from jaxblt.training.optimisers.by_optax import AdamWConfig, Optimizer
from jaxblt.training.optimisers.schedule import make_schedule
from jaxblt.training.packing import align, take_back_promises
from jaxblt.training.routing.hybrid import HybridConfig
from jaxblt.training.start.reference import ReferenceConfig
from jaxblt.training.start.startup import USER_CACHE
from jaxblt.training.state import Weights
from jaxblt.training.stored.serialize import from_json, to_json
from jaxblt.validation import MOST_SEED, check_bounds, check_buildable, check_fields, check_read


@dataclass(frozen=True)
class TrainConfig:
    """How long a run lasts and what it writes on the way; every `*_every` counts steps.

    Attributes:
      steps: optimiser steps, the learning rate's horizon.
      accumulate: micro-batches that a batch is cut into, to fit in memory; the gradient is the whole batch's.
      seed: the seed of parameters, objective and dropout.
      dtype: dtype of the computation; parameters and reductions are fp32.
      ema: decay of an exponential moving average of the parameters, such as 0.999, which evaluations then score and
        `jaxblt.load` reads; None for none. It takes the memory of the parameters once more.
      trackers: where figures, pictures and texts go: "jsonl" is `metrics.jsonl`, which `jaxblt sweep` reads, and
        "tensorboard" the events in the run folder; "wandb" and "trackio" are extras to install.
      sample_bytes: bytes of text that the model generates at each evaluation, from the beginning of the validation
        split; 0 for none. The first one compiles the decoder.
      log_every: steps between log lines; a line describes the step it is written at.
      eval_every: steps between evaluations on the validation split, which also follow the last step; 0 for none at all.
      eval_start: evaluate before the first step too, so that the start may be kept as the best.
      eval_batches: the most batches of an evaluation during training, evenly spread over the split; None for all of it.
      checkpoint_every: steps between checkpoints; the last step is always saved.
      checkpoint_every_s: the most seconds between checkpoints, whatever the steps; None for no limit.
      keep: checkpoints kept, the newest ones.
      keep_best: checkpoints kept besides: those of the evaluations with the best headline figures, saved as they are
        found. `jaxblt.load(run_dir, step="best")` reads the best one.
      patience: evaluations in a row without a better headline figure after which the run ends; None for no such end.
      best_by: figure that `keep_best` and `patience` go by instead of the headline one, such as "mcc", or "NAME/mcc" of
        one of several tasks.
      max_skips: steps in a row whose gradient may be non-finite (and is not applied) before the run fails.
      max_overflow: share of patch boundaries that may be refused for want of slots before the run fails.
      time_limit_s: seconds of training after which the run saves and ends, whatever the step; None for no limit. Those
        of all processes of the run count: raise it to go on in another piece.
      profile_steps: (first, last) steps to trace with the profiler; None for none.
      compilation_cache: folder in which compiled programs outlive the process; "user" for the one in the user's cache
        (not on CPUs), None for none.
    """

    steps: int = 1000
    accumulate: int = 1
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    ema: float | None = None
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = ("jsonl", "tensorboard")
    sample_bytes: int = 0
    log_every: int = 10
    eval_every: int = 200
    eval_start: bool = False
    eval_batches: int | None = None
    checkpoint_every: int = 200
    checkpoint_every_s: float | None = 300.0
    keep: int = 2
    keep_best: int = 0
    patience: int | None = None
    best_by: str | None = None
    max_skips: int = 5
    max_overflow: float = 0.1
    time_limit_s: float | None = None
    profile_steps: tuple[int, int] | None = None
    compilation_cache: str | None = USER_CACHE

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "steps", "accumulate", "log_every", "checkpoint_every", "max_skips", least=1)
        check_bounds(self, "eval_every", least=0, why=": 0 evaluates never")
        check_bounds(self, "eval_batches", least=1, why=": None takes the whole split")
        check_bounds(self, "seed", least=0, most=MOST_SEED)
        check_bounds(self, "ema", above=0, below=1, why=": it is a decay, and None averages nothing")
        check_bounds(self, "keep", least=2, why=", so that there is one to fall back to")
        check_bounds(self, "keep_best", "sample_bytes", least=0)
        check_bounds(self, "patience", least=1, why=": None ends no run early")
        for name in ("eval_start", "keep_best", "patience", "best_by", "sample_bytes"):
            check_read(self, name, needed="eval_every above 0", is_read=self.eval_every > 0)
        check_bounds(self, "max_overflow", least=0, most=1, why=": it is a share")
        check_bounds(self, "checkpoint_every_s", "time_limit_s", above=0, why=": seconds, None sets no limit")
        check_bounds(self, "profile_steps", least=0)
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"TrainConfig.profile_steps is (first, last) with first <= last, got {self.profile_steps}"
            )

    @property
    def weights(self) -> Weights:
        """The parameters that the run is judged by: their average, if it has one."""
        return "raw" if self.ema is None else "ema"

    @property
    def compute_dtype(self) -> Any:
        """`dtype` as jax knows it."""
        return jnp.dtype(self.dtype)


@dataclass(frozen=True)
class Recipe:
    """A training run.

    The data says how documents lie in rows, and models are built accordingly. What the config of a mixer promises
    (`packed`, `segment_alignment`) is checked against the data and then taken back, so that the recipe can be given
    other data. `data.alignment` of packed documents becomes a multiple of the patcher's block, or of MAC's chunk.

    Attributes:
      name: the run's name, and that of its folder in `runs`.
      model: config of the model, e.g. `BLTConfig` or `ByteLMConfig`.
      data: config of the data, documents or a task; rows of a batch and bytes of a row are its.
      objective: what the model predicts.
      optimizer: the optimiser and its schedule.
      train: length, precision, logging, checkpoints.
      mesh: how many ways data and parameters are split.
      patcher: how bytes become patches; None for a model without patches.
      bytes_per_patch: mean length to calibrate a missing threshold for, and with it a missing capacity.
      entropy_run: run folder of the trained entropy model whose entropies cut the patches.
      entropy_model: its config; filled in from `entropy_run` when the run starts.
      init_from: run folder whose newest parameters (not their average) the run starts from, with a fresh optimiser.
      fresh: patterns of names of parameters that are new, and not taken from `init_from`: "label_head/*".
      freeze: patterns of names of parameters that stay as `init_from` has them: "embedding/*". They lie in
        `TrainState.frozen` as its base, without gradients or optimiser slots.
      base_run: run folder of a model that stays frozen; its config is `model` without adapters
        (`jaxblt.adapters.attach`), and these are trained alone.
      also_train: patterns of paths of the base's parameters that are trained besides, such as "embedding/bytes".
      experts: folders of static adapters over the same base, runs or PEFT files, that the experts of the model's
        banks start as; () to draw them.
      reference: a second model whose predictions are held close to; None for none.
      hybrid: weights of the loss's parts by step, with imitation of labels and reinforcement of routers; None for the
        objective's loss.
    """

    name: str
    model: Any
    data: RowsConfig
    objective: Objective = NextByte()
    optimizer: Optimizer = AdamWConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    patcher: PatcherConfig | None = None
    bytes_per_patch: float | None = None
    entropy_run: str | None = None
    entropy_model: Any = None
    init_from: str | None = None
    fresh: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    base_run: str | None = None
    also_train: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    reference: ReferenceConfig | None = None
    hybrid: HybridConfig | None = None

    __repr__ = show

    def __post_init__(self) -> None:
        check_fields(self)
        check_buildable(self, "model")
        if self.entropy_model is not None:
            check_buildable(self, "entropy_model")
        check_bounds(self, "bytes_per_patch", least=1)
        if self.name in (".", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name must be a plain word, it names a folder; got {self.name!r}")
        if (self.fresh or self.freeze) and self.init_from is None:
            raise ValueError(
                f"fresh = {self.fresh} and freeze = {self.freeze} need a run to start from: set init_from to its folder"
            )
        _check_direction(self)
        _check_vocabulary(self)
        make_schedule(self.optimizer, self.train.steps)
        _check_patcher(self)
        _check_layout(self)
        _check_base(self)
        _check_chain(self)
        _check_tasks(self)
        _check_heads(self)
        _check_outputs(self)
        _check_classes(self)
        check_followed(self)
        _check_reference(self)
        _check_hybrid(self)
        _settle_rows(self)

    def to_json(self) -> str:
        """As JSON, from which `from_json` makes an equal recipe."""
        return to_json(self)

    @staticmethod
    def from_json(text: str) -> "Recipe":
        """The recipe that `to_json` wrote.

        Raises:
          ValueError: it is not a recipe, or holds a class or field that this version does not know.
        """
        recipe = from_json(text)
        if not isinstance(recipe, Recipe):
            raise ValueError(f"expected a Recipe, got a {type(recipe).__name__}")
        return recipe


def _check_direction(recipe: Recipe) -> None:
    """A model that sees the future must not be asked for the next byte, and one that does not must not fill gaps."""
    objective, model, patcher = recipe.objective, recipe.model, recipe.patcher
    kind = type(objective).__name__
    if objective.causal != model.causal:
        raise ValueError(
            f"objective {kind} needs a model with causal={objective.causal}, but model.causal is {model.causal}"
        )
    if objective.causal and patcher is not None and not patcher.causal:
        raise ValueError(
            f"patcher mode {patcher.mode!r} looks ahead, which would leak bytes to objective {kind}: use a causal mode"
        )


def _check_vocabulary(recipe: Recipe) -> None:
    """A model must have an embedding and a logit for every id that the data may hold."""
    ids = getattr(recipe.data, "vocab_size", VOCAB_SIZE)
    known = getattr(recipe.model, "vocab_size", ids)
    if known < ids:
        raise ValueError(f"model.vocab_size must be at least {ids}, the ids of the data, got {known}")


def _check_patcher(recipe: Recipe) -> None:
    """Entropies need a patcher to use them, and one that uses them needs a source of them and a threshold."""
    patcher = recipe.patcher
    recipe.model.build(patcher=patcher)  # refuses a patcher for a model without patches
    if patcher is None:
        if recipe.entropy_run is not None:
            raise ValueError(
                "entropy_run is set but patcher is None: entropies cut patches, so name a patcher"
            )
        return
    sources = (recipe.entropy_run, recipe.entropy_model, recipe.data.entropies)
    if patcher.needs_entropies and all(source is None for source in sources):
        raise ValueError(
            f"patcher mode {patcher.mode!r} needs entropies: set entropy_run to the folder of a trained entropy model, "
            "or data.entropies to a file of precomputed ones"
        )
    if patcher.needs_entropies and patcher.threshold is None and recipe.bytes_per_patch is None:
        raise ValueError(
            "the patcher has no threshold: set bytes_per_patch, the mean length to calibrate it for, or "
            "patcher.threshold in nats"
        )


def _settle_rows(recipe: Recipe) -> None:
    """Aligns packed documents, and leaves to the data what mixers may take for granted of rows."""
    data, patcher = align(recipe.model, recipe.data, recipe.patcher), recipe.patcher
    object.__setattr__(recipe, "data", data)
    for name in ("model", "entropy_model"):
        model = take_back_promises(getattr(recipe, name), name, data, patcher)
        object.__setattr__(recipe, name, model)


def layout_of(model: Any) -> SequenceLayout:
    """The order in which the model of a config wants its bytes where a mesh splits the sequence."""
    return getattr(model, "layout", CONTIGUOUS)


def _check_layout(recipe: Recipe) -> None:
    """Objectives but the next byte go by the order of the batch, and patches are cut by it."""
    if layout_of(recipe.entropy_model) != CONTIGUOUS:
        raise ValueError("an entropy model needs bytes in order: train one with layout='contiguous'")
    if layout_of(recipe.model) != CONTIGUOUS and not isinstance(recipe.objective, NextByte):
        kind = type(recipe.objective).__name__
        raise ValueError(
            f"objective {kind} needs bytes in order, and the model's layout is {layout_of(recipe.model).kind!r}: use "
            "NextByte, or layout='contiguous'"
        )


def _check_base(recipe: Recipe) -> None:
    """What is trained over a base starts as the base does."""
    if recipe.base_run is not None and recipe.init_from is not None:
        raise ValueError(
            f"base_run={recipe.base_run!r} and init_from={recipe.init_from!r} both say what the run starts from: leave "
            "one of them None"
        )
    if recipe.also_train and recipe.base_run is None:
        raise ValueError(
            f"also_train={recipe.also_train} is trained over a frozen base, and base_run is None: every parameter is "
            "trained without one"
        )
    if recipe.experts and recipe.base_run is None:
        raise ValueError(
            f"experts={recipe.experts} are LoRAs over a frozen base, and base_run is None: set it to the base's folder"
        )


def _check_chain(recipe: Recipe) -> None:
    """A CRF's loss needs the potentials that its head gives, and reads rows from one end to the other."""
    crf = getattr(getattr(recipe.model, "head", None), "crf", False)
    if crf != isinstance(recipe.objective, ClassifyChain):
        raise ValueError(
            f"model.head.crf is {crf} and the objective is {type(recipe.objective).__name__}: objective ClassifyChain "
            "and head.crf=True go together"
        )
    if crf and recipe.mesh.seq != 1:
        raise ValueError(f"a CRF reads whole rows, and mesh.seq is {recipe.mesh.seq}: set it to 1")


def _check_tasks(recipe: Recipe) -> None:
    """Each of several tasks needs labels and a head of its name; weights are learned by heads and objective alike."""
    heads, objective = getattr(recipe.model, "head", None), recipe.objective
    asked = {task.name for task in objective.tasks} if isinstance(objective, MultiTask) else set()
    labels = {task.column for task in getattr(recipe.data, "tasks", ())}
    answered = {task.name for task in heads.tasks} if isinstance(heads, TaskHeadsConfig) else set()
    if not asked == labels == answered:
        raise ValueError(
            f"the objective has tasks {sorted(asked)}, data.tasks {sorted(labels)} and model.head {sorted(answered)}: "
            "name the same in all, as `finetune_recipe` does"
        )
    learned = isinstance(heads, TaskHeadsConfig) and heads.uncertainty
    if isinstance(objective, MultiTask) and learned != (objective.weighting == "uncertainty"):
        raise ValueError(
            f"objective.weighting is {objective.weighting!r} and model.head.uncertainty is {learned}: only "
            "'uncertainty' and True go together"
        )


def _check_heads(recipe: Recipe) -> None:
    """A head answers with what the labels are, and has an output for each class: without one a loss would be NaN."""
    heads, data = getattr(recipe.model, "head", None), recipe.data
    if not isinstance(data, LabelledDataConfig):
        return
    asked = {task.column: task for task in data.tasks} or {"": data}
    several = heads.tasks if isinstance(heads, TaskHeadsConfig) else ()
    answered = {task.name: task.head for task in several} or {"": heads}
    for name, labels in asked.items():
        head = answered[name]
        if not isinstance(head, LabelHeadConfig):
            continue
        fixed = len(labels.classes) or head.outputs
        if (head.target, head.outputs) != (labels.target, fixed):
            raise ValueError(
                f"model.head{name and f' of task {name!r}'} has {head.outputs} outputs for a {head.target!r}, and the "
                f"labels of data are a {labels.target!r} of {fixed}, {labels.classes}: make the head that "
                "`finetune_recipe` makes for them"
            )


def _check_outputs(recipe: Recipe) -> None:
    """A classifier is asked for classes of rows and a language model for bytes: else logits fit no target."""
    objective, model = recipe.objective, recipe.model
    kind, name = type(objective).__name__, type(model).__name__
    if isinstance(model, ByteClassifierConfig) and not isinstance(objective, Classify):
        raise ValueError(
            f"model {name} answers with a class for each row, and the objective is {kind}: use Classify and data with "
            "labels, or a language model"
        )
    of_labels = (Classify, ClassifyPositions, ClassifyChain, Regress, MultiTask)
    if isinstance(model, ByteLMConfig | BLTConfig) and isinstance(objective, of_labels):
        fitting = (
            "ByteClassifierConfig or LabellerConfig" if isinstance(objective, Classify) else "LabellerConfig"
        )
        raise ValueError(
            f"objective {kind} asks for labels, and model {name} answers with bytes: use a {fitting}, or NextByte"
        )


def _check_classes(recipe: Recipe) -> None:
    """A classifier has an output for each class that a label may be of: without one a loss would be NaN."""
    if not isinstance(recipe.objective, Classify) or (classes := _num_classes(recipe)) is None:
        return
    of_head = getattr(getattr(recipe.model, "head", None), "outputs", None)
    outputs = getattr(recipe.model, "num_classes", of_head)
    if outputs is not None and outputs < classes:
        name = "num_classes" if of_head is None else "head.outputs"
        raise ValueError(
            f"labels of data may be of {classes} classes, and model.{name} is {outputs}: set it to {classes}"
        )


def _num_classes(recipe: Recipe) -> int | None:
    return getattr(recipe.data, "num_classes", None)


def _check_reference(recipe: Recipe) -> None:
    """Predictions are compared id by id, with a model that there is."""
    if recipe.reference is None:
        return
    if recipe.reference.run is None and recipe.base_run is None:
        raise ValueError(
            "reference.run is None, which stands for the frozen base, and base_run is None: set one of them to the "
            "folder of a run"
        )
    if not isinstance(recipe.objective, NextByte):
        kind = type(recipe.objective).__name__
        raise ValueError(
            f"reference compares predictions of the next byte, and the objective is {kind}: use NextByte"
        )


def _check_hybrid(recipe: Recipe) -> None:
    """What trains routers beside the loss has routers, bytes in order and the next byte to predict."""
    hybrid = recipe.hybrid
    if hybrid is None:
        return
    weighed = recipe.reference is not None or not hybrid.has("reference")
    check_read(hybrid, "reference", needed="Recipe.reference", is_read=weighed)
    if not isinstance(recipe.objective, NextByte):
        kind = type(recipe.objective).__name__
        raise ValueError(f"hybrid weighs losses of the next byte, and the objective is {kind}: use NextByte")
    adapters = [stack.adapter for stack in stacks_of(recipe.model).values() if stack.adapter is not None]
    if (hybrid.has("labels") or hybrid.draws) and not any(adapter.blocks for adapter in adapters):
        raise ValueError(
            "hybrid trains routers of banks, and no stack of the model has one: attach an AdapterConfig with blocks"
        )
    classes = _num_classes(recipe)
    fewest = min((adapter.blocks for adapter in adapters if adapter.blocks), default=0)
    if hybrid.has("labels") and classes is not None and classes > fewest:
        raise ValueError(
            f"hybrid.labels may be of {classes} classes, and a bank has {fewest} experts: set AdapterConfig.blocks = "
            f"{classes}"
        )
    if hybrid.draws and not any(isinstance(t, Draw) for adapter in adapters for t in adapter.code):
        raise ValueError(
            "hybrid.reinforcement needs a policy, and no bank draws its experts: set AdapterConfig.code = (Draw(),)"
        )
    if (hybrid.draws or hybrid.has("labels")) and (recipe.patcher is not None or recipe.mesh.seq != 1):
        raise ValueError(
            f"hybrid credits bytes to choices in whole rows of bytes, and patcher is {recipe.patcher} with mesh.seq = "
            f"{recipe.mesh.seq}: use a model without patches and mesh.seq = 1"
        )


def differences(old: Any, new: Any, where: str = "recipe") -> list[str]:
    """What differs between two configs, one "path: old -> new" a field."""
    if isinstance(old, Mapping) and isinstance(new, Mapping) and old.keys() == new.keys():
        return [d for name in old for d in differences(old[name], new[name], f"{where}[{name!r}]")]
    if type(old) is not type(new) or not is_dataclass(old):
        return [] if old == new else [f"{where}: {old!r} -> {new!r}"]
    names = [field.name for field in fields(old)]
    return [
        d for name in names for d in differences(getattr(old, name), getattr(new, name), f"{where}.{name}")
    ]
