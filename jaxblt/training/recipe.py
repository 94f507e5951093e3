"""A recipe: everything that defines a training run, as one frozen dataclass."""

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
      bytes_per_patch: mean length to calibrate a missing threshold for, and with it a missing capacity; in mode
        learned the length that the router is led to.
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
        """Turn what older versions stored into today's fields: weights of a loss stood beside the objective."""
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
    """A part of a recipe that demands something of the others."""

    def check(self, recipe: Any) -> None:
        """Raise ValueError, with the value, what was expected and the fix, if the recipe does not suit the part."""
        ...


def parts_of(recipe: Recipe) -> Iterator[Demanding]:
    """Yield the fields of a recipe that have demands. A part asks what it is made of itself, as a model asks its head.

    The entropy model was trained by a recipe of its own and is not asked.
    """
    for field in fields(recipe):
        part = getattr(recipe, field.name)
        if field.name != "entropy_model" and isinstance(part, Demanding):
            yield part


def _check_direction(recipe: Recipe) -> None:
    """Check that the model sees the future only if the objective lets it, and knows every id of the data."""
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
    """Check that what reads bytes in their order gets them so: patches, and objectives without `any_order`."""
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
    """Check that parameters come from one place, and that what is named beside that place is read."""
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
    """Return the config of a model's router, or of that of its base; None for a model without."""
    return getattr(getattr(model, "base", model), "router", None)


def _settle_router(recipe: Recipe) -> None:
    """Tell the patcher of learned boundaries its target, and whether the router reads entropies."""
    patcher, router = recipe.patcher, router_of(recipe.model)
    if patcher is None or patcher.mode != "learned":
        return
    told = {"target": recipe.bytes_per_patch, "reads_entropies": getattr(router, "reads_entropies", False)}
    object.__setattr__(recipe, "patcher", replace(patcher, **told))


def _settle_rows(recipe: Recipe) -> None:
    """Align packed documents, and leave to the data what mixers may take for granted of rows."""
    data, patcher = align(recipe.model, recipe.data, recipe.patcher), recipe.patcher
    object.__setattr__(recipe, "data", data)
    for name in ("model", "entropy_model"):
        model = take_back_promises(getattr(recipe, name), name, data, patcher)
        object.__setattr__(recipe, name, model)
