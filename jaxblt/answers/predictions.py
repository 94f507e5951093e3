"""The labels that a run gives records: of one task, or of several."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxblt.answers.tables import write_tsv
from jaxblt.data.sources.labelled import LabelledRecord
from jaxblt.show import show


@dataclass(frozen=True, eq=False)
class Predictions:
    """Labels that a run gives records, in the order given.

    Attributes:
      names: of the records.
      classes: names of the classes; () for numbers.
      predictions: for each record its likeliest class, a number, or one class for each byte as text.
      probabilities: Float32[N, C] of the classes; None for numbers and positions.
      labels: what the data say, where they do.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    predictions: tuple[Any, ...]
    probabilities: np.ndarray | None = None
    labels: tuple[str, ...] | None = None

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def summary(self) -> str:
        """Say in a few words how many records have each class, or the range of numbers."""
        if self.probabilities is None:
            return (
                "labelled byte by byte"
                if self.classes
                else f"{min(self.predictions):.4g} to {max(self.predictions):.4g}"
            )
        counts = Counter(self.predictions)
        return ", ".join(f"{counts[name]} {name}" for name in self.classes if counts[name])

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write columns: name, label (if known), a probability for each class, and prediction.

        Each column of probabilities is named after its class.
        """
        header, values = zip(("name", self.names), *self.columns(), strict=True)
        write_tsv(path, header, zip(*values, strict=True))

    def columns(self) -> list[tuple[str, Any]]:
        """Return names and values of the columns of `to_tsv` behind the name."""
        columns: list[tuple[str, Any]] = []
        if self.labels is not None:
            columns.append(("label", self.labels))
        if self.probabilities is not None:
            columns += [
                (name, p.tolist()) for name, p in zip(self.classes, self.probabilities.T, strict=True)
            ]
        columns.append(("prediction", self.predictions))
        return columns

    def with_labels(self, records: Iterable[LabelledRecord]) -> "Predictions":
        """Return the predictions with what the data say of each record."""
        return replace(self, labels=tuple(record.label for record in records))


@dataclass(frozen=True, eq=False)
class TaskPredictions:
    """Labels that a run gives records, task by task, in the order given.

    Attributes:
      names: of the records.
      tasks: the predictions of each task, by its name.
    """

    names: tuple[str, ...]
    tasks: Mapping[str, Predictions]

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, task: str) -> Predictions:
        return self.tasks[task]

    def summary(self) -> str:
        """Say the summary of each task, in a few words."""
        return "; ".join(f"{name}: {found.summary()}" for name, found in self.tasks.items())

    def with_labels(self, records: Sequence[LabelledRecord]) -> "TaskPredictions":
        """Return the predictions with what the data say of each record; "" where they say nothing."""
        return replace(
            self,
            tasks={
                name: replace(found, labels=tuple(record.labels[place] for record in records))
                for place, (name, found) in enumerate(self.tasks.items())
            },
        )

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write a column name, and those of each task with "task/" in front of their names."""
        columns: list[tuple[str, Any]] = [("name", self.names)]
        for name, found in self.tasks.items():
            columns += [(f"{name}/{column}", values) for column, values in found.columns()]
        header, values = zip(*columns, strict=True)
        write_tsv(path, header, zip(*values, strict=True))
