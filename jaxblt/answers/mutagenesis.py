"""Effects of all single substitutions: how much likelier, or how much more of a class, each mutant of a record is."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxblt.answers.classify import class_number, read_answers
from jaxblt.answers.continued import Continued, can_continue
from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Reader, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE, log_likelihoods, scoring_reader, target_counts
from jaxblt.answers.tables import write_tsv
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.rows import stream_ids
from jaxblt.data.sources import BytesSource, DocumentSource
from jaxblt.data.sources.base import read_document
from jaxblt.data.vocab import OFFSET
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.show import show
from jaxblt.training.objectives.objectives import Regress

AT_ONCE = 255
"""Mutants that are read together, beside the record: 256 rows."""


@dataclass(frozen=True, eq=False)
class Mutagenesis:
    """Effects of substitutions, in the order of the records.

    Attributes:
      names: of the records.
      sequences: their bytes, as the run read them.
      alphabet: the letters that stand in for others.
      effects: for each record Float64[L, A], position by letter; 0 at a record's own letters. For a run that predicts
        bytes they are log p(mutant) - log p(record) in nats, NaN at bytes that do not count. For a run on classes they
        are the gain of the label's log-odds against all other classes in nats. For a run on numbers they are the gain
        of the number.
      labels: the class of each record whose log-odds are compared; None for other runs.
    """

    names: tuple[str, ...]
    sequences: tuple[bytes, ...]
    alphabet: str
    effects: tuple[np.ndarray, ...]
    labels: tuple[str, ...] | None = None

    __repr__ = show

    def __len__(self) -> int:
        return len(self.names)

    def to_tsv(self, path: str | os.PathLike[str]) -> None:
        """Write columns name, label (of runs on classes), position from 1, reference, and one for each letter."""
        labelled = ("label",) if self.labels is not None else ()
        write_tsv(path, ("name", *labelled, "position", "reference", *self.alphabet), self._rows())

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for i, (name, sequence, effects) in enumerate(
            zip(self.names, self.sequences, self.effects, strict=True)
        ):
            label = () if self.labels is None else (self.labels[i],)
            for place, row in enumerate(effects.tolist()):
                yield name, *label, place + 1, chr(sequence[place]), *row


def mutagenesis(
    run: TrainedRun,
    sequences: Sequences,
    *,
    alphabet: str = "ACGT",
    label: str | None = None,
    window: int | None = None,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Mutagenesis:
    """Return the effect of every single substitution of every record: L · (A - 1) mutants a record of L bytes.

    Each mutant is read as a record of its own, as `score` and `classify` read it. A model of bytes that predicts the
    next one goes on from its state where mutants depart from the record. So half the bytes of long records are read.
    Records of at most 128 bytes, those longer than a window, models with patches and rows on a mesh are read whole.

    Args:
      run: trained to predict the next byte, or fine-tuned on one class or number of each record.
      sequences: a list of bytes or text, a path, or a DocumentSource; see `open_records` for case.
      alphabet: letters that stand in for others, each one byte.
      label: of a run on classes, the class whose log-odds are compared; by default what the run calls each record.
      window: of a run that predicts bytes, most positions of a row; None for the length of its training rows.
      batch_size: mutants that are read at once.
      as_trained: case and scored characters are those of the run's data; False takes every byte as it is.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: the run answers otherwise; an option does not go with it; a letter does not count; or what `score`
        and `classify` raise of a record.
    """
    if not alphabet.isascii() or len(set(alphabet)) != len(alphabet) or len(alphabet) < 2:
        raise ValueError(
            f"alphabet must be at least two different letters of one byte each, got {alphabet!r}"
        )
    options = {"batch_size": batch_size, "as_trained": as_trained, "mesh": mesh}
    source = open_records(sequences, run.recipe.data, as_trained=as_trained)
    records = [read_document(source, i) for i in range(len(source))]
    data = run.recipe.data
    if isinstance(data, LabelledDataConfig):
        if window is not None:
            raise ValueError(
                f"window = {window} is of runs that predict bytes: a run on labels reads whole records"
            )
        labels, answers = _label_answers(run, data, source, label, make_reader(run, window=None, **options))
    else:
        if label is not None:
            raise ValueError(
                f"label = {label!r} is of runs on classes, and this one predicts bytes: leave it out"
            )
        reader = scoring_reader(run, window=window, **options)
        labels, answers = None, _likelihoods(reader, source, alphabet, data)
    effects = [_effects(record, alphabet, answer) for record, answer in zip(records, answers, strict=True)]
    return Mutagenesis(tuple(source.names), tuple(records), alphabet, tuple(effects), labels)


Answer = Callable[[list[bytes]], np.ndarray]
"""What a run says of versions of a record of equal length, Float64[N]."""


def _effects(record: bytes, alphabet: str, answer: Answer) -> np.ndarray:
    """Return Float64[L, A]; an answer of NaN is of a record and mutants that cannot be compared."""
    effects = np.zeros((len(record), len(alphabet)))
    places = [
        (t, a) for t in range(len(record)) for a, letter in enumerate(alphabet) if ord(letter) != record[t]
    ]
    for group in batched(places, AT_ONCE):
        mutants = [record[:t] + alphabet[a].encode() + record[t + 1 :] for t, a in group]
        # Read the record anew beside its mutants: sums of another call, or from another byte, are rounded otherwise
        found = answer([record, *mutants])
        effects[tuple(zip(*group, strict=True))] = found[1:] - found[0]
    return effects


def _likelihoods(reader: Reader, source: DocumentSource, alphabet: str, data: Any) -> Iterable[Answer]:
    """Return what a run says of each record: log p in nats; NaN if another number of bytes counts than in the record.

    Answers are made one by one, as each may hold a state.

    Raises:
      ValueError: a letter of the alphabet does not count.
    """
    counted = reader.letters.counted
    if unknown := [letter for letter in alphabet if not counted[ord(letter) + OFFSET]]:
        raise ValueError(
            f"alphabet {alphabet!r} has {unknown[0]!r}, and the run learned only scored={reader.letters.scored!r}: "
            "leave it out, or take every byte with as_trained=False (--no-as-trained)"
        )
    pairs = target_counts(source, data)

    def answer_of(i: int) -> Answer:
        record, count = BytesSource([read_document(source, i)]), int(pairs[i])
        own = log_likelihoods(reader, record, pairs[i : i + 1])[1][0]
        continued = None
        if can_continue(reader, count):
            continued = Continued(reader, stream_ids(record, 0, 0, count))

        def answer(versions: list[bytes]) -> np.ndarray:
            given = BytesSource(versions)
            found = None
            if continued is not None:
                ids = [stream_ids(given, j, 0, count) for j in range(len(versions))]
                found = continued(np.stack(ids))
            if found is None or not np.isfinite(found[0]).all():
                # Read whole what is not finite, which names the byte
                found = log_likelihoods(reader, given, np.full(len(versions), count))
            return np.where(found[1] == own, found[0], np.nan)

        return answer

    return (answer_of(i) for i in range(len(source)))


def _label_answers(
    run: TrainedRun, data: LabelledDataConfig, source: DocumentSource, label: str | None, reader: Reader
) -> tuple[tuple[str, ...] | None, list[Answer]]:
    """Return the class of each record that is compared, and what the run says of each record: log-odds or a number."""
    objective, asked = run.recipe.objective, class_number(data, label)

    def logits(versions: DocumentSource) -> np.ndarray:
        return np.stack(read_answers(data, reader, versions)).astype(np.float64)

    if isinstance(objective, Regress):
        return None, [lambda versions: logits(BytesSource(versions))[:, 0] * objective.scale] * len(source)
    chosen = logits(source).argmax(1).tolist() if asked is None else [asked] * len(source)

    def answer_of(c: int) -> Answer:
        def answer(versions: list[bytes]) -> np.ndarray:
            found = logits(BytesSource(versions))
            return found[:, c] - np.logaddexp.reduce(np.delete(found, c, 1), 1)

        return answer

    return tuple(data.classes[c] for c in chosen), [answer_of(c) for c in chosen]
