"""The data of `jaxblt evaluate`: a split of the run's data, or files that the command line names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxblt.answers.records import open_records
from jaxblt.data.config import DataConfig
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.mixture import JoinedSource
from jaxblt.data.sources import DocumentSource
from jaxblt.data.splits import SplitName


class Evaluated(NamedTuple):
    """The data to evaluate.

    Attributes:
      data: config of its rows.
      split: of it.
      source: documents to use instead of those that the config names; None for those.
    """

    data: Any
    split: SplitName
    source: DocumentSource | None = None


def find_data(
    own: Any,
    files: Sequence[str],
    labels: str | None,
    split: SplitName | None,
    options: Mapping[str, int | None],
) -> Evaluated:
    """Return what to evaluate: a run's test split by default, or all of the files named.

    Args:
      own: data of the run's recipe.
      files: to read instead, with the run's rows and letters.
      labels: table of the files' labels, for FASTA.
      split: that is asked for.
      options: "seq_len" and "context" of windows, None where they are not given.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: an option does not go with the data, or a run on a task is given files.
    """
    data = _rows(own, **options)
    if labels is not None and not (files and isinstance(own, LabelledDataConfig)):
        raise ValueError(f"--labels {labels} is of --files with records for a run on labels: leave it out")
    if not files:
        return Evaluated(data, split or "test")
    if isinstance(own, LabelledDataConfig):
        alone = {"split": "hash", "validation_paths": (), "test_paths": ()}
        return Evaluated(replace(data, paths=tuple(files), labels=labels, **alone), split or "all")
    if not isinstance(own, DataConfig):
        raise ValueError(f"--files {files[0]}: the run was trained on a task, which makes its own rows")
    # Leave out what is of the run's own documents: entropies and names
    data = replace(data, entropies=None, split="position", validation_names=(), test_names=())
    opened = tuple(open_records(file, own) for file in files)
    return Evaluated(data, split or "all", opened[0] if len(opened) == 1 else JoinedSource(opened))


def _rows(data: Any, *, seq_len: int | None, context: int | None) -> Any:
    """Return the data with rows of the length and context asked for, half a row by default."""
    if data.packing == "windows":
        length = data.seq_len if seq_len is None else seq_len
        return replace(data, seq_len=length, stride=None, context=length // 2 if context is None else context)
    if seq_len is not None or context is not None:
        raise ValueError(
            f"--seq-len and --context are of windows, and the run's data.packing is {data.packing!r}: leave them out"
        )
    return data
