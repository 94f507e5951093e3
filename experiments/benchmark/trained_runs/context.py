"""Bits per byte of the same bytes after longer and longer contexts: python -m experiments.benchmark context RUN_DIR."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro

from jaxblt.data import Dataset, DocumentSource, WindowIndex, make_dataset
from jaxblt.data.rows import Span, pair_counts
from jaxblt.data.schedule import OnePass

if TYPE_CHECKING:
    from jaxblt.run import Run

Split = Literal["train", "validation", "test", "all"]


@dataclass(frozen=True, eq=False)
class Endings:
    """Row k is the `row_length` pairs that end where window k ends, of which the last `targets` are scored."""

    windows: WindowIndex
    row_length: int
    targets: int

    def __len__(self) -> int:
        return len(self.windows)

    def spans(self, row: int) -> list[Span]:
        """Return the one span of a row."""
        ((document, _, stop, _, _),) = self.windows.spans(row)
        return [Span(document, stop - self.row_length, stop, 0, stop - self.targets)]


def context_rows(
    whole: Dataset, context: int, *, longest: int, targets: int, stride: int | None = None
) -> Dataset:
    """Return rows of `context` bytes whose last `targets` bytes are those of every other context.

    Args:
      whole: the split, in mode "eval".
      context: bytes that the model is given, the scored ones included.
      longest: of all contexts.
      targets: bytes scored in a row.
      stride: bytes from the end of one row to the end of the next; None for `longest`.

    Raises:
      ValueError: no document has `longest` bytes.
    """
    config, part = whole.config, whole.source
    pairs = pair_counts(part.lengths, part.ends, eos=config.ends_with_eos)
    windows = WindowIndex(pairs, longest, longest if stride is None else stride, "drop")
    if not len(windows):
        raise ValueError(
            f"no document has the {longest} bytes of the longest context (the longest has {pairs.max(initial=0)}): "
            "choose shorter contexts"
        )
    index = Endings(windows, context, targets)
    schedule = OnePass((len(index),), 1)
    return replace(whole, config=replace(config, batch_size=1), indexes=(index,), schedule=schedule)


def scores(loaded: "Run", rows: Dataset, chosen: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Yield Σ nats and number of the scored bytes of each chosen row, one row at a time on one device."""
    import jax

    from jaxblt.parallel import MeshConfig
    from jaxblt.parallel.rules import replicated
    from jaxblt.training.evaluate import make_eval_step
    from jaxblt.training.start.setup import to_devices

    mesh = MeshConfig(data=1).build(jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        # Leave out segment ids, as rows are full: the model then runs as in training
        step = make_eval_step(replace(loaded.task, packed=False))
        state = jax.device_put(loaded.state, replicated(mesh))
        for row in chosen:
            found = step(state, to_devices(rows.batch(row), mesh, 1), np.int32(row))
            yield float(found["nll"]), float(found["weight"])


def document_nats(
    loaded: "Run",
    contexts: Sequence[int],
    *,
    targets: int,
    split: Split = "test",
    stride: int | None = None,
    max_rows: int | None = None,
    source: DocumentSource | None = None,
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Return Σ nats of each document's scored bytes after each context, and the number of these bytes.

    Raises:
      ValueError: `targets` is not in 1..shortest context, or no document is as long as the longest.
    """
    check_targets(contexts, targets)
    contexts = sorted(set(contexts))
    whole = make_dataset(loaded.recipe.data, split=split, mode="eval", source=source)
    nats, num_bytes = {}, np.zeros(0)
    for context in contexts:
        rows = context_rows(whole, context, longest=contexts[-1], targets=targets, stride=stride)
        chosen = spread(rows.num_rows, max_rows)
        _, document = np.unique(
            [rows.indexes[0].spans(row)[0].document for row in chosen], return_inverse=True
        )
        sums = np.array(list(scores(loaded, rows, chosen)))
        nats[context], num_bytes = (np.bincount(document, weights=column) for column in sums.T)
    return nats, num_bytes.astype(np.int64)


def check_targets(contexts: Sequence[int], targets: int) -> None:
    """Raise ValueError unless the shortest context holds the scored bytes, of which there is one at least."""
    if not contexts or not 1 <= targets <= min(contexts):
        raise ValueError(f"targets must lie in 1..the shortest context of {sorted(contexts)}, got {targets}")


def figures_of(nats: Mapping[int, np.ndarray], num_bytes: np.ndarray) -> list[dict[str, Any]]:
    """Return bits per byte and perplexity of the same bytes after each context, and its gain over the shortest.

    Intervals are over documents (`jaxblt.evaluation.document_bits_per_byte`); that of the gain is of paired
    differences, so that documents that are hard at every context do not widen it.

    Args:
      nats: by context, of each document.
      num_bytes: scored, of each document.
    """
    from jaxblt.evaluation import document_bits_per_byte

    found, shortest = [], nats[min(nats)]
    for context, each in nats.items():
        score, gain = (document_bits_per_byte(x, num_bytes) for x in (each, shortest - each))
        perplexity = {end: 2 ** getattr(score, end) for end in ("value", "low", "high")}
        figures = {"bits_per_byte": asdict(score), "perplexity": perplexity, "gain": asdict(gain)}
        found.append({"context": context, **figures})
    return found


def spread(count: int, most: int | None) -> list[int]:
    """Return all of `count` rows, or `most` of them at equal distances."""
    kept = count if most is None else min(most, count)
    return [round(i * (count - 1) / max(kept - 1, 1)) for i in range(kept)]


def context(
    run_dir: Annotated[str, tyro.conf.Positional],
    out: str,
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 32768),
    split: Split = "test",
    targets: int = 256,
    stride: int | None = None,
    max_rows: int | None = None,
) -> None:
    """Score the same bytes of a split after contexts of several lengths.

    Writes bits per byte of each. Every context ends with the same `targets` bytes, and only they are scored. The bytes
    before a context are not seen at all: positions, patches and entropies begin with it.

    Args:
      run_dir: folder of the run.
      out: file for the figures as JSON.
      contexts: bytes that the model is given, the scored ones included.
      split: of the run's data.
      targets: bytes scored at the end of each context.
      stride: bytes from one scored stretch to the next; the longest context by default.
      max_rows: the most stretches to score, spread over the split; all by default.
    """
    import jaxblt
    from experiments.benchmark.figures.saved import save

    loaded = jaxblt.load(run_dir)
    nats, num_bytes = document_nats(
        loaded, contexts, split=split, targets=targets, stride=stride, max_rows=max_rows
    )
    found = figures_of(nats, num_bytes)
    save(
        "context",
        out,
        {
            "run": loaded.recipe.name,
            "step": loaded.step,
            "split": split,
            "targets": targets,
            "contexts": found,
        },
    )
