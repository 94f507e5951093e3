"""What every public config needs to be made."""

from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from typing import Any

from jaxblt.adapters import Side
from jaxblt.adapters.files.serving import Limits
from jaxblt.cli.benchmark import BenchmarkOptions
from jaxblt.cli.plan import PlanConfig
from jaxblt.data import DataConfig, LabelledDataConfig, SourceConfig, TaskDataConfig
from jaxblt.data.kmers import KmerVocab
from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.tasks import Babi, Babilong, Copy, ListOpsFiles, PixelClasses, TextLabels, TextPairs
from jaxblt.inference import Decoder, Drafts, SamplingConfig
from jaxblt.inference.engine import EngineConfig, Lane, Request, Sampling
from jaxblt.mixers import ImplicitFilter
from jaxblt.models import ByteLMConfig, LabellerConfig, StackConfig, TaskHead, TaskHeadsConfig
from jaxblt.models.experimental.coded_turns import CodedTurnsConfig
from jaxblt.parallel.experimental import Schedule
from jaxblt.parallel.layout import SequenceLayout
from jaxblt.training.experimental.online import OnlineConfig
from jaxblt.training.objectives.objectives import Classify, MultiTask, TaskLoss
from jaxblt.training.optimisers.schedule import ScheduleConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.names import NAMES

BYTES = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("recurrence",)))
NEEDED: dict[type, dict[str, Any]] = {
    TaskLoss: {"name": "t", "objective": Classify()},
    MultiTask: {"tasks": (TaskLoss("t", Classify()),)},
    SourceConfig: {"name": "s"},
    LabelledDataConfig: {"paths": ("labelled.csv",)},
    LabelTask: {"column": "kind"},
    TaskDataConfig: {"task": Copy(), "seq_len": 64},
    ListOpsFiles: {"path": "data"},
    Babi: {"path": "data"},
    Babilong: {"path": "data", "books": "books"},
    TextLabels: {"path": "data"},
    TextPairs: {"path": "data"},
    PixelClasses: {"path": "data"},
    KmerVocab: {},
    Schedule: {"stages": 2, "micro_batches": 4},
    SequenceLayout: {},
    Drafts: {},
    SamplingConfig: {},
    EngineConfig: {},
    Lane: {},
    Request: {"prompt": b""},
    Sampling: {},
    Decoder: {"model": BYTES},
    LabellerConfig: {"base": BYTES},
    TaskHead: {"name": "t"},
    TaskHeadsConfig: {"tasks": (TaskHead("t"),)},
    CodedTurnsConfig: {
        "base": ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("state_engine",)))
    },
    ImplicitFilter: {"filter_len": 64},
    Recipe: {"name": "r", "model": BYTES, "data": DataConfig()},
    PlanConfig: {},
    BenchmarkOptions: {},
    ScheduleConfig: {},
    OnlineConfig: {},
    Side: {"features": 2},
    Limits: {},
}
"""Configs that are not stored, and fields of stored ones that have no default."""


def _stored() -> Iterator[type]:
    for place in NAMES.values():
        module, _, name = place.partition(":")
        yield getattr(import_module(module), name)


def _needed(kind: Any) -> dict[str, Any]:
    """Return the fields that a config needs: a mixer needs its width."""
    dim = kind.__dataclass_fields__.get("dim")
    return NEEDED.get(kind, {} if dim is None or dim.default is not MISSING else {"dim": 64})


GOOD = {kind: _needed(kind) for kind in dict.fromkeys([*_stored(), *NEEDED])}
"""Every config class, with what it needs to be made."""


def by_class[T](table: dict[str, T]) -> dict[type, T]:
    """Return a table by the names of configs as one by their classes."""
    named = {kind.__name__: kind for kind in GOOD}
    return {named[name]: row for name, row in table.items()}
