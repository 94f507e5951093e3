"""Records in rows of a few lengths: which bytes stand where, as a function of only the record.

A record of at most `window` pairs (see `jaxblt.data.rows`) has a row of its own, in the shortest bucket that holds it.
A longer one is read in windows of `window` pairs that begin `stride` pairs apart. Every pair is scored in one window,
the first that holds it. Pairs scored after the first window have `window - stride` pairs of context or more.

Every program has a fixed number of rows, and rows without a record are empty. So a record is always read by the same
program, and what stands in the other rows does not matter.

On a mesh rows lie as in training (`start.placement`). Their number and lengths are rounded up until they
divide among the devices.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxblt.adapters.code.override import refuse_inside
from jaxblt.answers.protocol import TrainedRun
from jaxblt.data.batch import Batch
from jaxblt.data.history import History
from jaxblt.data.letters import Letters, letters_of
from jaxblt.data.rows import Span, empty_rows, stream_ids, write_span
from jaxblt.data.sources import DocumentSource, whole
from jaxblt.data.vocab import PAD
from jaxblt.data.windows import WindowIndex
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.start.placement import Placement, find_mesh, place_params, placement_of
from jaxblt.training.start.setup import HISTORY_MULTIPLE
from jaxblt.training.state import gathered
from jaxblt.training.step import Task
from jaxblt.validation import whole as check_whole

SHORTEST = 128
"""Positions in the rows of the first bucket; each further one is twice as long, up to the window."""

ALONE = RowLayout(packed=False)
"""A row holds one record, from its start."""

IN_FLIGHT = 2
"""Batches handed to the device before the oldest result is fetched."""


@dataclass(frozen=True, eq=False)
class Reader:
    """A model and how it reads records.

    Attributes:
      task: model and entropy model that take rows of one document.
      params: of the model.
      frozen: trees that were not trained, the entropy model's among them.
      window: most positions of a row.
      stride: pairs from one window of a long record to the next.
      batch_size: rows of every program.
      history: what an entropy model has to know of a record before a window that begins inside it.
      letters: what is scored of the records, and their case.
      placement: the devices that read.
    """

    task: Task
    params: Any
    frozen: dict[str, Any]
    window: int
    stride: int
    batch_size: int
    history: History | None
    letters: Letters = Letters()
    placement: Placement = Placement()

    @property
    def named_params(self) -> dict[str, Any]:
        """All parameters, by what an error is to call them."""
        return {"model": self.params, **{name: tree.params for name, tree in self.frozen.items()}}


def make_reader(
    run: TrainedRun,
    *,
    window: int | None,
    batch_size: int,
    as_trained: bool = True,
    mesh: MeshConfig | Mesh | None = None,
) -> Reader:
    """Return how a run reads records.

    Args:
      run: a trained run.
      window: most positions of a row; None for the length of the run's training rows.
      batch_size: rows of a program.
      as_trained: the run's data say which letters are scored, and their case.
      mesh: of the devices that read; None for the one in force, or one device.

    Raises:
      ValueError: `window` is less than 2, or `batch_size` less than 1.
      ValueError: the mesh does not suit the devices.
      ValueError: `given` or `guarded` of `jaxblt.adapters` stands around the call.
    """
    refuse_inside("jaxblt.answers", "leave it, or merge the adapter at a code (jaxblt.adapters.fuse)")
    length: int = run.recipe.data.seq_len if window is None else window
    check_whole("window", length, least=2)
    check_whole("batch_size", batch_size, least=1)
    recipe = run.recipe
    model, entropy_model = (promise(config, ALONE) for config in (recipe.model, recipe.entropy_model))
    dtype = recipe.train.compute_dtype
    task = Task(
        model.build(dtype=dtype, patcher=run.patcher),
        entropy_model=None if entropy_model is None else entropy_model.build(dtype=dtype),
    )
    grid = 1 if run.patcher is None else run.patcher.block_size
    # Keep the blocks of a window where the record's own blocks are
    stride = max(length // 2 // grid * grid, 1) if length >= 2 * grid else length // 2
    letters = letters_of(recipe.data) if as_trained else Letters()
    placement = placement_of(recipe, find_mesh(mesh))
    params, frozen = run.params, run.frozen
    if placement.mesh is not None:
        params, frozen = place_params(recipe, params, frozen, placement.mesh)
    rows, history = placement.rows(batch_size), _history(run)
    return Reader(task, params, frozen, length, stride, rows, history, letters, placement)


def _history(run: TrainedRun) -> History | None:
    """Return the history that entropies are read with, as in training on windows.

    See `jaxblt.training.start.setup.entropy_history`. The packing of training plays no part.
    """
    patcher, model = run.patcher, run.recipe.entropy_model
    if patcher is None or not patcher.needs_entropies or model is None:
        return None
    if patcher.entropy_context is not None:
        return History(patcher.entropy_context, patcher.entropy_context // 2)
    reach = getattr(model, "receptive_field", None)
    return None if reach is None else History(-(-(reach + 1) // HISTORY_MULTIPLE) * HISTORY_MULTIPLE)


Call = Callable[[Any, dict[str, Any], Batch], Any]
"""A jitted function of parameters, frozen trees and rows."""


def answer[T](
    reader: Reader, call: Call, source: DocumentSource, pairs: np.ndarray
) -> Iterator[tuple[tuple[Span, ...], Batch, Any]]:
    """Yield spans, the batch that holds them and what `call` says of it, all on the host.

    Args:
      reader: see `make_reader`.
      call: see `Call`.
      source: the records.
      pairs: Int64[N], pairs to read of each.
    """

    def computed() -> Iterator[tuple[tuple[Span, ...], Batch, Any]]:
        for spans, batch in read(reader, source, pairs):
            with reader.placement.in_force:
                found = call(reader.params, reader.frozen, reader.placement.batch(batch))
            yield spans, batch, found

    for spans, batch, found in ahead(computed()):
        yield spans, batch, jax.tree.map(gathered, found)


def read(
    reader: Reader, source: DocumentSource, pairs: np.ndarray
) -> Iterator[tuple[tuple[Span, ...], Batch]]:
    """Yield batches of NumPy rows, and the record's span in each row that is not empty.

    Args:
      reader: see `make_reader`.
      source: the records.
      pairs: Int64[N], pairs to read of each.
    """
    short = np.flatnonzero(pairs <= reader.window)
    edges = np.unique([reader.placement.length(length) for length in bucket_lengths(reader.window)])
    home = np.searchsorted(edges, pairs[short])
    for b, length in enumerate(edges.tolist()):
        spans = (Span(i, 0, int(pairs[i]), 0, 0) for i in short[home == b].tolist())
        for group in batched(spans, reader.batch_size):
            yield group, _fill(reader, source, group, length, None)
    for group in batched(_windows(reader, pairs), reader.batch_size):
        yield group, _fill(reader, source, group, edges.tolist()[-1], reader.history)


def bucket_lengths(window: int) -> list[int]:
    """Return lengths of rows: 128, 256, ... below the window, and the window."""
    lengths = [window]
    size = SHORTEST
    while size < window:
        lengths.append(size)
        size *= 2
    return sorted(lengths)


def _windows(reader: Reader, pairs: np.ndarray) -> Iterator[Span]:
    """Yield the windows of the records that are longer than a row."""
    long = np.flatnonzero(pairs > reader.window)
    index = WindowIndex(pairs[long], reader.window, reader.stride, score="new")
    for row in range(len(index)):
        (span,) = index.spans(row)
        yield span._replace(document=int(long[span.document]))


def _fill(
    reader: Reader, source: DocumentSource, spans: tuple[Span, ...], length: int, history: History | None
) -> Batch:
    arrays = empty_rows(reader.batch_size, length)
    if history is not None:
        arrays["history"] = np.full((reader.batch_size, history.length), PAD, np.int32)
    records = whole(source)
    for i, span in enumerate(spans):
        row = {name: array[i] for name, array in arrays.items()}
        write_span(row, stream_ids(source, span.document, span.start, span.stop), span, 1)
        if history is not None:
            before = history.ids(records, span, flip=False)
            row["history"][history.length - len(before) :] = before
    fields: dict[str, Any] = dict(arrays)
    return Batch(**fields)


def ahead[T](results: Iterable[T]) -> Iterator[T]:
    """Yield results, each asked for a few before its use.

    The device works on the next ones while the host looks at one.
    """
    waiting: deque[T] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) >= IN_FLIGHT:
            yield waiting.popleft()
    yield from waiting
