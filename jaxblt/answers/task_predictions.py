"""The predictions of each task by a run with several tasks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxblt.answers.tables import write_tsv
from jaxblt.data.sources.labelled import LabelledRecord
from jaxblt.show import show

if TYPE_CHECKING:
    from jaxblt.answers.classify import Predictions


@dataclass(frozen=True, eq=False)
class TaskPredictions:
    """Labels that a run gives records, task by task, in the order given.

    Attributes:
      names: of the records.
      tasks: the predictions of each task, by its name.
    """

    names: tuple[str, ...]
    tasks: Mapping[str, "Predictions"]

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, task: str) -> "Predictions":
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
