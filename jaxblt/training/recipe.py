"""The recipe: a frozen dataclass with everything that defines a training run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxblt.data.task_data import RowsConfig
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.parallel.layout import CONTIGUOUS, layout_of
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching.config import PatcherConfig
from jaxblt.show import show
from jaxblt.training.objectives.objectives import NextByte, Objective
from jaxblt.training.objectives.reference import ReferenceConfig
from jaxblt.training.optimisers.by_optax import AdamWConfig, Optimizer
from jaxblt.training.packing import align, take_back_promises
from jaxblt.training.train_config import TrainConfig
from jaxblt.validation import check_bounds, check_buildable, check_fields


@dataclass(frozen=True)
class Recipe:
    """The definition of a training run.

    The data decides how documents lie in rows, and models are built accordingly. If a mixer's config makes promises
    about rows (`packed`, `segment_alignment`), they are checked against the data. Then they are reset to their
    defaults, so that the recipe also works with other data. `data.alignment` of packed documents is raised to a
    multiple of the patcher's block, or of MAC's chunk.

    Attributes:
      name: name of the run, and of its folder in `runs`.
      model: config of the model, e.g. `BLTConfig` or `ByteLMConfig`.
      data: config of the data, documents or a task; it sets the rows of a batch and the bytes of a row.
      objective: what the model predicts, and its loss.
      optimizer: the optimiser and its schedule.
      train: number of steps, precision, logging, checkpoints.
      mesh: into how many parts data and parameters are split.
      patcher: rule that cuts bytes into patches; None for a model without patches.
      bytes_per_patch: target for the mean patch length. Calibration finds a missing threshold and capacity for it; in
        mode "learned" the ratio loss aims at it.
      entropy_run: run folder of the trained entropy model whose entropies cut the patches.
      entropy_model: config of that entropy model; filled in from `entropy_run` when the run starts.
      init_from: run folder whose newest parameters (not their average) the run starts from, with a fresh optimiser.
      fresh: patterns of names of new parameters, which are not taken from `init_from`: "label_head/*".
      freeze: patterns of names of parameters of `init_from` that are not trained: "embedding/*". They are stored in
        `TrainState.frozen` as the base, without gradients or optimiser state.
      base_run: run folder of a frozen base model for adapters. `model` is the base's config with adapters
        (`jaxblt.adapters.attach`), and only the adapters are trained.
      also_train: patterns of paths of the base's parameters that are trained too, such as "embedding/bytes".
      experts: folders of static adapters over the same base (runs or PEFT files) with which the experts of the model's
        banks start; () to draw them at random.
      reference: a second model to whose predictions a loss keeps the model close, or None.
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

    __repr__ = show

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Convert fields of older versions: weights of a hybrid loss were stored beside the objective."""
        hybrid = stored.pop("hybrid", None)
        if hybrid is not None:
            plain = stored.get("objective", NextByte())
            smoothing, accuracy = plain.label_smoothing, plain.accuracy
            stored["objective"] = replace(hybrid, label_smoothing=smoothing, accuracy=accuracy)
        return stored

    def __post_init__(self) -> None:
        check_fields(self)
        check_buildable(self, "model")
        if self.entropy_model is not None:
            check_buildable(self, "entropy_model")
        check_bounds(self, "bytes_per_patch", least=1)
        if self.name in (".", "..") or Path(self.name).name != self.name:
            raise ValueError(f"name must be a plain word, it names a folder; got {self.name!r}")
        _check_direction(self)
        _check_order(self)
        _check_start(self)
        _settle_router(self)
        self.model.build(patcher=self.patcher)  # refuses a patcher for a model without patches
        for part in parts_of(self):
            part.check(self)
        _settle_rows(self)


@runtime_checkable
class Demanding(Protocol):
    """A part of a recipe that places demands on other parts."""

    def check(self, recipe: Any) -> None:
        """Raise ValueError, with the value, what was expected and the fix, if the recipe does not suit the part."""
        ...


def parts_of(recipe: Recipe) -> Iterator[Demanding]:
    """Yield the fields of a recipe that have a `check`.

    Such a part calls the checks of its own parts, as a model does for its head. The entropy model is left out, because
    it was trained by a recipe of its own.
    """
    for field in fields(recipe):
        part = getattr(recipe, field.name)
        if field.name != "entropy_model" and isinstance(part, Demanding):
            yield part


def _check_direction(recipe: Recipe) -> None:
    """Check that model and objective agree on `causal`, and that the model knows every id of the data."""
    objective, model = recipe.objective, recipe.model
    if objective.causal != model.causal:
        raise ValueError(
            f"objective {type(objective).__name__} needs a model with causal={objective.causal}, but model.causal is "
            f"{model.causal}"
        )
    ids = getattr(recipe.data, "vocab_size", VOCAB_SIZE)
    known = getattr(model, "vocab_size", ids)
    if known < ids:
        raise ValueError(f"model.vocab_size must be at least {ids}, the ids of the data, got {known}")


def _check_order(recipe: Recipe) -> None:
    """Check that patches, and objectives without `any_order`, get the bytes of a row in order."""
    if layout_of(recipe.entropy_model) != CONTIGUOUS:
        raise ValueError("an entropy model needs bytes in order: train one with layout='contiguous'")
    layout, any_order = layout_of(recipe.model), getattr(recipe.objective, "any_order", False)
    if layout != CONTIGUOUS and not any_order:
        kind = type(recipe.objective).__name__
        raise ValueError(
            f"objective {kind} needs bytes in order, and the model's layout is {layout.kind!r}: use NextByte, or "
            "layout='contiguous'"
        )


def _check_start(recipe: Recipe) -> None:
    """Check that parameters start from one run at most, and that fields which need such a run have it."""
    if (recipe.fresh or recipe.freeze) and recipe.init_from is None:
        raise ValueError(
            f"fresh = {recipe.fresh} and freeze = {recipe.freeze} need a run to start from: set init_from to its folder"
        )
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
    if recipe.entropy_run is not None and recipe.patcher is None:
        raise ValueError("entropy_run is set but patcher is None: entropies cut patches, so name a patcher")


def router_of(model: Any) -> Any:
    """Return the config of the router of a model or of its base, or None."""
    return getattr(getattr(model, "base", model), "router", None)


def _settle_router(recipe: Recipe) -> None:
    """Set the target length in a patcher of learned boundaries, and whether its router reads entropies."""
    patcher, router = recipe.patcher, router_of(recipe.model)
    if patcher is None or patcher.mode != "learned":
        return
    told = {"target": recipe.bytes_per_patch, "reads_entropies": getattr(router, "reads_entropies", False)}
    object.__setattr__(recipe, "patcher", replace(patcher, **told))


def _settle_rows(recipe: Recipe) -> None:
    """Set the alignment of packed documents, and reset the promises of mixers, which the data decide."""
    data, patcher = align(recipe.model, recipe.data, recipe.patcher), recipe.patcher
    object.__setattr__(recipe, "data", data)
    for name in ("model", "entropy_model"):
        model = take_back_promises(getattr(recipe, name), name, data, patcher)
        object.__setattr__(recipe, name, model)
