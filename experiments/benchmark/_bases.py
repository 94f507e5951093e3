"""What adapters are tried on: the model of a run, its patcher calibrated on the mix, and an index of the mix."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from experiments.benchmark._adaptation import FROZEN
from experiments.benchmark._arms import Arm, Settings
from experiments.benchmark._mix import Mix
from experiments.benchmark._reviews import Reviews
from jaxblt.adapters import join_params
from jaxblt.adapters.retrieval.neighbours import INDEX
from jaxblt.adapters.router import ROUTER
from jaxblt.answers import build_index
from jaxblt.data.config import DataConfig
from jaxblt.data.sources import BytesSource
from jaxblt.data.vocab import OFFSET
from jaxblt.models import BLTConfig, ByteLMConfig
from jaxblt.models.row_layout import RowLayout
from jaxblt.training.flops import count_params
from jaxblt.training.state import content_hash
from jaxblt.training.step import Task

if TYPE_CHECKING:
    from jaxblt import Run

SAMPLE_BYTES = 1 << 18
"""Of the mix, that a patcher is calibrated on."""


class Base(NamedTuple):
    """What is adapted.

    Attributes:
      model: config for rows of one document each.
      params: of it, and under `FROZEN` the trees that its patcher reads.
      task: patcher and entropy model; None for a model without patches.
    """

    model: Any
    params: Any
    task: Task | None = None

    def says(self, run: "Run") -> dict[str, Any]:
        """Which run it is, by its parameters' content hash, and how bytes are cut, for the figures."""
        found = {"run": run.recipe.name, "step": run.step, "parameters": count_params(run.params)[0]}
        found |= {"content_hash": content_hash(run.params)}
        if self.task is None or self.task.patcher is None:
            return found
        patcher = self.task.patcher
        return found | {
            "patcher": {name: getattr(patcher, name) for name in ("mode", "threshold", "capacity")}
        }


def open_base(run: "Run", train: Mix | Reviews, settings: Settings) -> Base:
    """A run's model; of one with patches threshold and capacity are those that the mix asks for.

    Raises:
      ValueError: the model predicts no bytes.
    """
    apart = RowLayout(packed=False)
    model: Any = run.recipe.model
    if not isinstance(model, ByteLMConfig | BLTConfig):
        raise ValueError(
            f"the base is a {type(model).__name__}, expected a ByteLMConfig or a BLTConfig: use books_512 or books"
        )
    model = model.in_rows(apart, apart)
    if run.patcher is None:
        return Base(model, run.params)
    rows = -(-SAMPLE_BYTES // settings.length)
    length = run.recipe.bytes_per_patch if run.patcher.mode in ("entropy", "greedy") else None
    sampled = run.recalibrate(_data(settings), source=_texts(train, rows, settings), bytes_per_patch=length)
    task = Task(sampled.model, entropy_model=sampled.entropy_model)
    return Base(model, {**run.params, FROZEN: run.frozen}, task)


def check_base(base: Base, arms: Mapping[str, Arm], mix: Mix | Reviews) -> None:
    """Raises ValueError for arms that this base or this mix cannot have."""
    if banks := [name for name, arm in arms.items() if base.task and arm.adapter and arm.adapter.blocks]:
        raise ValueError(
            f"--arms {', '.join(banks)} pick experts byte by byte, and the base has patches: leave them out, or use a "
            "run without patches, such as books_512"
        )
    told = [name for name, arm in arms.items() if arm.labelled or arm.over_oracle or arm.searches]
    if isinstance(mix, Reviews) and told:
        raise ValueError(
            f"--arms {', '.join(told)} are told a byte's domain or search texts, and the domain of a review is the "
            "label to be found: leave them out"
        )


def given_to(arm: Arm, run: "Run", base: Base, train: Mix | Reviews, settings: Settings) -> tuple[Any, Any]:
    """The frozen parameters of an arm and what it is trained on.

    A router that searches an index has one of texts that the arm is not trained on: a chunk of its own row would be
    its nearest neighbour.
    """
    if not arm.searches:
        return base.params, train
    assert isinstance(train, Mix)
    rest, held = train.held_out()
    rows = -(-settings.index * settings.chunk // settings.length)
    texts = _texts(held, rows, settings)
    data, size = _data(settings), settings.index
    found = build_index(run, chunk=settings.chunk, data=data, source=texts, most=size).params(size)
    return join_params(base.params, {"stack": {ROUTER: {INDEX: found}}}), rest


def _texts(mix: Mix | Reviews, rows: int, settings: Settings) -> BytesSource:
    """Rows of a mix as documents."""
    drawn = mix.draw(jax.random.key(1), rows, settings.length, settings.spans)
    ids = np.asarray(drawn.inputs)
    there = np.ones_like(ids) if drawn.segment_ids is None else np.asarray(drawn.segment_ids)
    return BytesSource(
        [(row[kept > 0] - OFFSET).astype(np.uint8).tobytes() for row, kept in zip(ids, there, strict=True)]
    )


def _data(settings: Settings) -> DataConfig:
    return DataConfig(
        seq_len=settings.length, batch_size=settings.rows, split="position", fractions=(1.0, 0.0, 0.0)
    )
