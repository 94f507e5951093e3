"""Labels of records: probabilities of classes, numbers, or a class for each byte."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float
from scipy.special import softmax

from jaxblt.answers.predictions import Predictions, TaskPredictions
from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Reader, answer, make_reader
from jaxblt.answers.records import Sequences, open_records
from jaxblt.answers.score import BATCH_SIZE
from jaxblt.data.batch import Batch
from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.sources import DocumentSource
from jaxblt.models.finite import explain_nonfinite
from jaxblt.models.label_head import content
from jaxblt.models.task_heads import TaskAnswers
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.objectives.crf import viterbi
from jaxblt.training.objectives.objectives import MultiTask, Regress
from jaxblt.training.state import whole_params
from jaxblt.training.step import Task, find_entropies


def classify(
    run: TrainedRun,
    sequences: Sequences,
    *,
    batch_size: int = BATCH_SIZE,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Predictions | TaskPredictions:
    """Label each record by a run that was fine-tuned on labels.

    A run of several tasks gives each record a label of each. A record is read as in training: BOS and its bytes in a
    row of its own, whatever stands beside it.

    Args:
      run: trained on a `LabelledDataConfig`.
      sequences: a list of bytes or text, a path, or a DocumentSource; see `open_records` for case and N.
      batch_size: rows that are read at once.
      as_trained: records have the case of the run's data; False takes every byte as it is.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.

    Raises:
      ValueError: the run was not trained on labels.
      ValueError: there is no record, an empty one, or one longer than a row.
      ValueError: an answer is not finite (names the record).
    """
    data = run.recipe.data
    if not isinstance(data, LabelledDataConfig):
        raise ValueError(
            f"run {run.recipe.name!r} was not trained on labels, its data is a {type(data).__name__}: make one that is "
            "with jaxblt finetune"
        )
    options = {"as_trained": as_trained, "mesh": mesh}
    reader = make_reader(run, window=None, batch_size=batch_size, **options)
    source = open_records(sequences, data, as_trained=as_trained)
    return _predictions(run, data, source, read_answers(data, reader, source))


def read_answers(data: LabelledDataConfig, reader: Reader, source: DocumentSource) -> list[Any]:
    """Return what a run on labels says of each record: logits or a scaled number, of each byte, or by task.

    Raises:
      ValueError: a record is longer than a row, or an answer is not finite; names the record.
    """
    pairs = np.asarray(source.lengths, np.int64) + 1
    if pairs.max() > reader.window:
        i = int(pairs.argmax())
        raise ValueError(
            f"record {source.names[i]!r} has {pairs[i] - 1} bytes, and the run reads at most "
            f"{reader.window - 1} behind BOS: cut it, or fine-tune with a larger data.seq_len"
        )
    answers: list[Any] = [None] * len(source)
    for spans, _, (logits, finite) in answer(reader, partial(_answers, reader.task), source, pairs):
        if not finite[: len(spans)].all():
            name = source.names[spans[int(np.argmin(finite))].document]
            raise ValueError(
                f"the answer for record {name!r} is not finite; {explain_nonfinite(reader.named_params)}"
            )
        for i, span in enumerate(spans):
            row = jax.tree.map(lambda x, i=i: x[i], logits)
            answers[span.document] = row[1 : pairs[span.document]] if data.target == "positions" else row
    return answers


def class_number(data: LabelledDataConfig, label: str | None) -> int | None:
    """Return the number of a class of the one label of each record; None for no class, which numbers never have.

    Raises:
      ValueError: the data have another kind of labels, or no such class.
    """
    if data.tasks or data.target == "positions":
        held = "several tasks" if data.tasks else "classes of positions"
        raise ValueError(f"the run learned {held}, expected a run on one class or number of each record")
    if label is None:
        return None
    if label not in data.classes:
        known = ", ".join(data.classes) or "none: it learned numbers"
        raise ValueError(f"label = {label!r} is none of the run's classes, {known}")
    return data.classes.index(label)


def _predictions(
    run: TrainedRun, data: LabelledDataConfig, source: DocumentSource, answers: list[Any]
) -> Predictions | TaskPredictions:
    names, objective = tuple(source.names), run.recipe.objective
    if not isinstance(objective, MultiTask):
        return _of_task(data, objective, names, answers)
    asked = {task.name: task.objective for task in objective.tasks}
    found = {
        task.column: _of_task(task, asked[task.column], names, [row[task.column] for row in answers])
        for task in data.tasks
    }
    return TaskPredictions(names, found)


def _of_task(
    data: LabelledDataConfig | LabelTask, objective: Any, names: tuple[str, ...], answers: list[Any]
) -> Predictions:
    found = Predictions(names, data.classes, ())
    if data.target == "number":
        assert isinstance(objective, Regress)
        numbers = [float(answer[0]) * objective.scale + objective.center for answer in answers]
        return replace(found, predictions=tuple(numbers))
    if data.target == "positions":
        return replace(found, predictions=tuple(_named(data, row.argmax(-1)) for row in answers))
    logits = np.stack(answers)
    best = tuple(data.classes[i] for i in logits.argmax(-1))
    return replace(found, predictions=best, probabilities=softmax(logits, -1))


def _named(data: LabelledDataConfig | LabelTask, numbers: np.ndarray) -> str:
    return "".join(data.classes[i] for i in numbers)


@partial(jax.jit, static_argnums=0)
def _answers(
    task: Task, params: Any, frozen: Any, batch: Batch
) -> tuple[Float[Array, "B *N"] | dict[str, Float[Array, "B _"]], Bool[Array, "B"]]:
    """Return answers of rows or of their positions, and whether those of each row are finite.

    Of several tasks they are given by name. For a CRF they are 1 for each position's class in the likeliest row and 0
    for others.
    """
    entropies = find_entropies(task, frozen, batch)
    logits, _ = task.model.apply(
        {"params": whole_params(params, frozen)},
        batch.inputs,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        entropies=entropies,
    )
    if isinstance(logits, TaskAnswers):
        logits = logits.outputs
        finite = jnp.all(jnp.concatenate([jnp.isfinite(x) for x in logits.values()], 1), 1)
        return logits, _with_entropies(finite, entropies)
    finite = jnp.isfinite(logits)
    if finite.ndim >= 3:
        finite = jnp.all(finite, tuple(range(2, finite.ndim))) | (batch.segment_ids <= 0)
    if logits.ndim == 4:  # potentials of a CRF
        likeliest = viterbi(logits, content(batch.inputs, batch.segment_ids))
        logits = jax.nn.one_hot(likeliest, logits.shape[-1], dtype=jnp.float32)
    finite = jnp.all(finite.reshape(len(finite), -1), 1)
    return logits, _with_entropies(finite, entropies)


def _with_entropies(finite: Bool[Array, "B"], entropies: Float[Array, "B T"] | None) -> Bool[Array, "B"]:
    """Return whether a row's entropies are finite too.

    One of NaN cuts no patch, and the answers would hide it.
    """
    return finite if entropies is None else finite & jnp.all(jnp.isfinite(entropies), 1)
