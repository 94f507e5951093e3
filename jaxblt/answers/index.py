"""An index for routers: base vectors of the chunks of a run's documents, as the run's own model sees them."""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters import detach
from jaxblt.adapters.code.router import Unscaled
from jaxblt.adapters.retrieval import Index, make_index
from jaxblt.adapters.update.attach import stacks_of
from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.reading import Reader, answer, make_reader
from jaxblt.answers.score import BATCH_SIZE
from jaxblt.data.batch import Batch
from jaxblt.data.config import DataConfig, apply_split, open_source
from jaxblt.data.keys import document_key
from jaxblt.data.letters import letters_of
from jaxblt.data.sources import DocumentSource, Regions
from jaxblt.data.splits import SplitName
from jaxblt.data.trust import check_trusted
from jaxblt.models.stack import Stack
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.state import content_hash, whole_params
from jaxblt.training.step import Task, find_entropies
from jaxblt.validation import whole as check_whole

CHUNKS = 16384
"""The most chunks of an index, if nothing else is asked for: as many as `Neighbours` holds."""


def build_index(
    run: TrainedRun,
    *,
    chunk: int = 64,
    neighbours: int = 8,
    stack: str | None = None,
    data: DataConfig | None = None,
    source: DocumentSource | None = None,
    split: SplitName = "train",
    most: int = CHUNKS,
    batch_size: int = BATCH_SIZE,
    mesh: MeshConfig | Mesh | None = None,
    trust_sources: bool = False,
) -> Index:
    """Return base vectors of whole chunks of documents, for a router over this run as its base.

    The router has chunks of the same size. Documents are read in rows of the run's length, one piece of a document a
    row, as training rows hold them. A chunk is `chunk` steps of a row from its beginning; what is left at its end is
    not indexed. Of more chunks than `most`, that many at about equal distances are kept. The host holds twice as many
    while it reads.

    Args:
      run: the base; its raw parameters, without adapters.
      chunk: steps, as of the `RouterConfig`.
      neighbours: k, `Neighbours.count`.
      stack: name of the router's stack; None for the model's first.
      data: the documents; None for the run's.
      source: documents to use instead of those that the data names.
      split: of the data.
      most: chunks.
      batch_size: rows that are read at once.
      mesh: how devices share rows and, along `seq`, the bytes of a row; None for the one in force, or one device.
      trust_sources: fetch URLs that the run's config names.

    Raises:
      ValueError: the run has adapters, or its parameters are averaged.
      ValueError: there is no such stack.
      ValueError: the data are no documents, or at a URL that is not trusted.
      ValueError: there are fewer whole chunks than neighbours.
    """
    for name, value in {"chunk": chunk, "neighbours": neighbours, "most": most}.items():
        check_whole(name, value, least=1)
    _check_base(run)
    name = _stack_name(run, stack)
    own = run.recipe.data
    check_trusted(own, own if data is None else data, trust_sources=trust_sources or source is not None)
    documents = _documents(run, data, source, split)
    reader = make_reader(run, window=None, batch_size=batch_size, mesh=mesh)
    reader = replace(reader, stride=reader.window)  # a piece of a document belongs to one row
    vectors, owners = _collect(reader, documents, name, chunk, most)
    kept = np.unique(np.linspace(0, len(owners) - 1, min(most, len(owners))).astype(np.int64))
    return make_index(
        vectors[kept],
        owners[kept],
        base=content_hash(run.params),
        stack=name,
        chunk=chunk,
        neighbours=neighbours,
    )


def _check_base(run: TrainedRun) -> None:
    if run.recipe.base_run is not None or detach(run.recipe.model) != run.recipe.model:
        raise ValueError(
            f"run {run.recipe.name!r} has adapters over base_run={run.recipe.base_run!r}: make the index of that base"
        )
    if run.weights != "raw":
        raise ValueError(
            f"the run was loaded with weights={run.weights!r}, and a base is the raw parameters: load it with "
            "weights='raw'"
        )


def _stack_name(run: TrainedRun, stack: str | None) -> str:
    known = list(stacks_of(run.recipe.model))
    if not known or (stack is not None and stack not in known):
        raise ValueError(
            f"stack {stack!r} of {type(run.recipe.model).__name__}: expected one of {known}, its stacks"
        )
    return known[0] if stack is None else stack


def _documents(
    run: TrainedRun, data: DataConfig | None, source: DocumentSource | None, split: SplitName
) -> Regions:
    config = run.recipe.data if data is None else data
    if not isinstance(config, DataConfig):
        raise ValueError(
            f"an index is made of documents, and the data is a {type(config).__name__}: give data=DataConfig(...)"
        )
    found = open_source(config) if source is None else letters_of(config).open(source)
    return apply_split(config, found, split)


def _collect(
    reader: Reader, documents: Regions, stack: str, chunk: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return base vectors of whole chunks, in the order of rows, and their documents' keys.

    They are `most`, or up to twice as many. Every chunk is kept at first, and every second one of those whenever there
    are more than twice as many as `most`.
    """
    width = stacks_of(reader.task.model.config)[stack].dim
    kept, distance, number = [], 1, 0
    call, pairs = partial(_row_vectors, reader.task, stack, chunk), np.asarray(documents.lengths, np.int64)
    for spans, _, (found, complete) in answer(reader, call, documents, pairs):
        for i, span in enumerate(spans):
            key = document_key(documents.source, int(documents.documents[span.document]))
            for vector in found[i][complete[i]]:
                if number % distance == 0:
                    kept.append((vector.copy(), key))
                number += 1
        while len(kept) > 2 * most:
            kept, distance = kept[::2], 2 * distance
    vectors = np.array([vector for vector, _ in kept], np.float32).reshape(-1, width)
    return vectors, np.array([key for _, key in kept], np.int32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _row_vectors(
    task: Task, stack: str, chunk: int, params: Any, frozen: Any, batch: Batch
) -> tuple[Float[Array, "B N D"], Bool[Array, "B N"]]:
    """Return base vectors of a row's chunks, and which of them are whole."""
    entropies, heard = find_entropies(task, frozen, batch), []

    def listen(call: Any, args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Stack) and module.path == (stack,) and context.method_name == "__call__":
            heard.append((args[0].astype(module.dtype), options["segment_ids"]))
        return call(*args, **options)

    with nn.intercept_methods(listen):
        task.model.apply(
            {"params": whole_params(params, frozen)},
            batch.inputs,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            entropies=entropies,
        )
    ((x, segment_ids),) = heard
    return chunk_vectors(x, segment_ids, chunk)


def chunk_vectors(
    x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"], chunk: int
) -> tuple[Float[Array, "B N D"], Bool[Array, "B N"]]:
    """Return the mean of x / RMS(x) over the tokens of each chunk, and which chunks are whole.

    Rows hold one document from its beginning. Holes are steps of a chunk and no tokens, as for a router.

    Returns:
      The means, and whether a chunk is whole and has a token.
    """
    rows, length, dim = x.shape
    count = length // chunk
    bare = Unscaled().apply({"params": {"scale": jnp.ones(dim, jnp.float32)}}, x)[0]
    segments = segment_ids[:, : count * chunk].reshape(rows, count, chunk)
    token = (segments > 0).astype(jnp.float32)
    total = jnp.einsum("bncd,bnc->bnd", bare[:, : count * chunk].reshape(rows, count, chunk, dim), token)
    tokens = jnp.sum(token, -1)
    whole = jnp.all(segments != 0, -1) & (tokens > 0)
    return total / jnp.maximum(tokens, 1.0)[..., None], whole
