"""The meaning of records' labels: classes and numbers; and several columns of labels, each a task of its own."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from jaxblt.data.sources.labelled import LabelledRecord
from jaxblt.validation import check_fields

UNLABELLED = -1
"""The class of an empty cell, an empty row, BOS and padding. The number of an empty cell is NaN."""
NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Pattern of columns that name tasks: the name stands in names of parameters, figures and files."""

Parts = Mapping[str, Sequence[LabelledRecord]]
"""Records by split."""


@dataclass(frozen=True)
class LabelTask:
    """A column of labels that is a task with a head of its own. Its cells may be empty.

    Attributes:
      column: of the labels; it names the task.
      target: what a label is: a "class" of the record, or a "number".
      classes: their names, which give classes their numbers; `with_classes` collects and sorts those of the files.
    """

    column: str
    target: Literal["class", "number"] = "class"
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if not NAME.fullmatch(self.column):
            raise ValueError(
                f"LabelTask.column must be letters, digits, '_', '-' and '.', got {self.column!r}: rename the column"
            )
        if len(set(self.classes)) != len(self.classes) or "" in self.classes:
            raise ValueError(f"LabelTask.classes must be different names, got {self.classes}")
        if self.target == "number" and self.classes:
            raise ValueError(f"classes {self.classes} are not of target='number': leave one of them out")

    @property
    def is_open(self) -> bool:
        """True while the classes are still to be collected."""
        return self.target == "class" and not self.classes


def check_task_names(recipe: Any) -> None:
    """Check that each of several tasks has labels in the data, a head of the model, and an objective.

    Raises:
      ValueError: objective, data and head name different tasks.
    """
    asked = {task.name for task in getattr(recipe.objective, "tasks", ())}
    labels = {task.column for task in getattr(recipe.data, "tasks", ())}
    answered = {task.name for task in getattr(getattr(recipe.model, "head", None), "tasks", ())}
    if not asked == labels == answered:
        raise ValueError(
            f"the objective has tasks {sorted(asked)}, data.tasks {sorted(labels)} and model.head {sorted(answered)}: "
            "name the same in all, as `finetune_recipe` does"
        )


def check_head(head: Any, labels: Any, name: str = "") -> None:
    """Check that a head answers with the kind of the labels, and has an output for each class.

    Args:
      head: of the model; one without `target` and `outputs` passes.
      labels: a `LabelTask`, or the data of one task.
      name: of the task, if there are several.

    Raises:
      ValueError: it does not.
    """
    if not (hasattr(head, "target") and hasattr(head, "outputs")):
        return
    fixed = len(labels.classes) or head.outputs
    if (head.target, head.outputs) != (labels.target, fixed):
        raise ValueError(
            f"model.head{name and f' of task {name!r}'} has {head.outputs} outputs for a {head.target!r}, and the "
            f"labels of data are a {labels.target!r} of {fixed}, {labels.classes}: make the head that "
            "`finetune_recipe` makes for them"
        )


def settle_tasks(tasks: Sequence[LabelTask], parts: Parts) -> tuple[LabelTask, ...]:
    """Return the tasks with the names of their classes, sorted as text, if they are still open.

    Raises:
      ValueError: no training record has a label of a task, or the labels name one class.
    """
    return tuple(_settled(task, labels_of(tasks, task, parts)) for task in tasks)


def _settled(task: LabelTask, labels: Mapping[str, Sequence[str]]) -> LabelTask:
    if not any(labels["train"]):
        raise ValueError(
            f"task {task.column!r} has no label among {len(labels['train'])} training records: fill its column, or "
            "leave the task out"
        )
    if not task.is_open:
        return task
    names = sorted({label for part in labels.values() for label in part if label})
    if len(names) < 2:
        raise ValueError(
            f"the labels of task {task.column!r} name one class, {names}: a model can only tell two or more apart"
        )
    return replace(task, classes=tuple(names))


def labels_of(tasks: Sequence[LabelTask], task: LabelTask, parts: Parts) -> dict[str, list[str]]:
    """Return the labels of a task by split, as the files hold them; "" for an empty cell."""
    place = list(tasks).index(task)
    return {part: [record.labels[place] for record in records] for part, records in parts.items()}


def describe_tasks(tasks: Sequence[LabelTask], parts: Parts) -> list[str]:
    """Return a line for each task: what it is, and how many records of each split have a label."""
    lines = []
    for task in tasks:
        kind = "number" if task.target == "number" else f"{len(task.classes)} classes"
        told = [
            f"{sum(map(bool, labels))} of {len(labels)} {part}"
            for part, labels in labels_of(tasks, task, parts).items()
        ]
        lines.append(
            f"task {task.column}: {kind}; labels of {', '.join(told)} records, empty cells do not count"
        )
    return lines


def task_targets(tasks: Sequence[LabelTask], records: Sequence[LabelledRecord]) -> dict[str, np.ndarray]:
    """Return classes Int32[records] or numbers Float32[records] of each task.

    Empty cells are `UNLABELLED` and NaN.

    Raises:
      ValueError: a label is no class or no finite number; names file and line.
    """
    found = {}
    for place, task in enumerate(tasks):
        labels = [(record.labels[place], record) for record in records]
        if task.target == "number":
            values = [as_number(label, record) if label else math.nan for label, record in labels]
            found[task.column] = np.array(values, np.float32)
        else:
            known = {name: i for i, name in enumerate(task.classes)}
            values = [as_class(label, record, known) if label else UNLABELLED for label, record in labels]
            found[task.column] = np.array(values, np.int32)
    return found


def task_labels(targets: Mapping[str, np.ndarray], numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Return the labels of a batch whose rows hold the records `numbers`; -1 is an empty row."""
    found = {}
    for name, values in targets.items():
        none = values.dtype.type(math.nan if values.dtype == np.float32 else UNLABELLED)
        found[name] = np.where(numbers < 0, none, values[numbers])
    return found


def as_class(label: str, record: LabelledRecord, numbers: Mapping[str, int]) -> int:
    """Return the number of a class.

    Raises:
      ValueError: there is none of the name.
    """
    if label not in numbers:
        known = ", ".join(list(numbers)[:8])
        raise ValueError(
            f"{record.place}: label {label!r:.40} of {record.name!r} is none of the classes {known}"
        )
    return numbers[label]


def as_number(label: str, record: LabelledRecord) -> float:
    """Return a label as a number.

    Raises:
      ValueError: it is none, or not finite.
    """
    try:
        number = float(label)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"{record.place}: label {label!r:.40} of {record.name!r} is no finite number: write one, or, of several "
            "tasks, leave the cell empty"
        )
    return number
