"""The regression on words that a head starts as, fitted to the training records before the first step.

Where a model then learns from its states what words do not say, it begins no worse than the regression does.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxblt.data.label_tasks import UNLABELLED
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.pipeline import make_dataset
from jaxblt.data.splits import SplitName
from jaxblt.models.label_head import LabelHeadConfig, content
from jaxblt.models.labeller import HEAD
from jaxblt.models.task_heads import TaskHeadsConfig
from jaxblt.models.word_features import WordsConfig, word_rows
from jaxblt.training.objectives.objectives import Classify, MultiTask, Regress
from jaxblt.training.recipe import Recipe

STRENGTHS = (0.1, 1.0, 10.0, 100.0)
"""Inverse weights of the penalty; validation ends the search at the first that is worse than the one before.

The strongest penalty comes first: a fit begins where the one before ended, and one without a penalty is slow and ends
early, so that the next one would begin badly.
"""
MOST_ITERATIONS = 200
PRECISION = {"classes": 1e-3, "numbers": 1e-5}
"""Relative gain of an iteration below which a fit ends.

Most of the loss of numbers stays whatever is fitted: a fit of them would end at once by the gain that ends one of
classes.
"""


class Examples(NamedTuple):
    """Records of one part: words as a sparse Float[N, W], and the class or the scaled number of each."""

    x: Any
    y: np.ndarray


class Regression(NamedTuple):
    """A fitted regression: kernel Float[W, C], bias Float[C]."""

    kernel: np.ndarray
    bias: np.ndarray


def with_words(recipe: Recipe, params: Any) -> Any:
    """Return the parameters before step 0, with the regressions of all heads that read words.

    Args:
      recipe: of the run; its data must have validation records, which choose the strength of the penalty.
      params: as they were drawn.
    """
    flat: dict[Any, Any] = dict(flatten_dict(params))
    for path, config, objective, task in _heads(recipe):
        assert config.words is not None
        assert isinstance(recipe.data, LabelledDataConfig)
        options = (
            {"center": objective.center, "scale": objective.scale} if isinstance(objective, Regress) else {}
        )
        parts = read_words(recipe.data, config.words, ("train", "validation"), task=task, **options)
        rarity, found = fit_words(parts["train"], parts["validation"], config.words, config.outputs)
        fitted = {("rarity",): rarity, ("outputs", "kernel"): found.kernel, ("outputs", "bias"): found.bias}
        for name, value in fitted.items():
            old = flat[*path, "words", *name]
            flat[*path, "words", *name] = jax.device_put(value.astype(np.float32), old.sharding)
    return unflatten_dict(flat)


def _heads(
    recipe: Recipe,
) -> Iterator[tuple[tuple[str, ...], LabelHeadConfig, Classify | Regress, str | None]]:
    """Yield path, config, objective and task of each head that reads words."""
    head, objective = getattr(recipe.model, "head", None), recipe.objective
    if isinstance(head, TaskHeadsConfig) and isinstance(objective, MultiTask):
        objectives = {task.name: task.objective for task in objective.tasks}
        for task in head.tasks:
            if task.head.words is not None:
                yield (HEAD, task.name), task.head, objectives[task.name], task.name
    elif isinstance(head, LabelHeadConfig) and head.words is not None:
        assert isinstance(objective, Classify | Regress)
        yield (HEAD,), head, objective, None


def read_words(
    data: LabelledDataConfig,
    config: WordsConfig,
    names: Sequence[SplitName],
    *,
    task: str | None = None,
    center: float = 0.0,
    scale: float = 1.0,
) -> dict[str, Examples]:
    """Return how often the records of the named parts have each word.

    Args:
      data: labelled records.
      config: of the words.
      names: of the parts.
      task: whose labels are read; records without one are left out. None if there is one label.
      center, scale: of numbers, which become (y - center) / scale.
    """
    from scipy.sparse import vstack  # here and below, as few runs fit words

    find = jax.jit(lambda ids, segments: word_rows(ids, content(ids, segments), config))
    parts = {}
    for name in names:
        dataset, counts, labels = make_dataset(data, split=name, mode="eval"), [], []
        for step in range(dataset.num_batches or 0):
            batch = dataset.batch(step)
            held: Any = batch.labels
            asked = np.asarray(held if task is None else held[task])
            is_known = asked != UNLABELLED if asked.dtype == np.int32 else np.isfinite(asked)
            kept = (batch.segment_ids > 0).any(1) & is_known
            counts.append(_counted(np.asarray(find(batch.inputs, batch.segment_ids))[kept], config.size))
            labels.append(asked[kept])
        y = np.concatenate(labels)
        parts[name] = Examples(vstack(counts, "csr"), y if y.dtype == np.int32 else (y - center) / scale)
    return parts


def _counted(rows: np.ndarray, size: int) -> Any:
    """Return how often each row has each feature."""
    record, _ = there = np.nonzero(rows < size)
    ones = np.ones(len(record), np.float32)
    from scipy.sparse import csr_matrix

    return csr_matrix((ones, (record, rows[there])), shape=(len(rows), size))


def weigh(part: Examples, rarity: np.ndarray, config: WordsConfig) -> Examples:
    """Return examples with the features of `weigh_words` instead of counts."""
    x = part.x.copy()
    x.data = (1 + np.log(x.data)) * rarity[x.indices]
    record = np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))
    block = record * len(config.edges) + np.searchsorted(config.edges, x.indices, "right")
    length = np.sqrt(np.bincount(block, x.data**2))
    x.data = (x.data / np.maximum(length, 1e-9)[block]).astype(np.float32)
    return Examples(x, part.y)


def find_rarity(counts: Any) -> np.ndarray:
    """Return the inverse frequency of words in records, log((1 + n) / (1 + holders)) + 1."""
    return np.log((1 + counts.shape[0]) / (1 + counts.getnnz(0))) + 1


def find_ratio(counts: Any, y: np.ndarray, config: WordsConfig) -> np.ndarray:
    """Return |log p(word | class 1) - log p(word | class 0)|, one added to the holders of each word in each class.

    p is a word's share of all words of its length. Source: Wang and Manning (2012, "Baselines and bigrams", section
    2.1), whose sign is left to the regression.
    """
    holders = np.stack([1.0 + counts[y == label].getnnz(0) for label in (0, 1)])
    edges = list(zip(config.edges, config.edges[1:], strict=False))
    logs = [np.log(own / own.sum(1, keepdims=True)) for own in (holders[:, a:b] for a, b in edges)]
    return np.abs(np.diff(np.concatenate(logs, 1), axis=0)[0])


def fit_words(
    train: Examples, validation: Examples, config: WordsConfig, outputs: int
) -> tuple[np.ndarray, Regression]:
    """Return weights of words, and the regression on words so weighed, whose loss on validation is the least.

    Words are weighed by their rarity, or those of two classes by the ratio of what classes have of them.

    Args:
      train: counts of training.
      validation: counts that choose.
      config: of the words.
      outputs: classes, or 1.
    """
    weights = [find_rarity(train.x)]
    if outputs == 2:
        weights.append(find_ratio(train.x, train.y, config))
    found = []
    for own in weights:
        held = weigh(validation, own, config)
        fitted = choose_features(weigh(train, own, config), held, config, outputs)
        found.append((loss(held.x, held.y, fitted), own, fitted))
    _, best, fitted = min(found, key=lambda each: each[0])
    return best, fitted


def answer_test(
    data: LabelledDataConfig, config: WordsConfig, outputs: int, *, center: float = 0.0, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the fitted regression says of each test record, Float[N, C], and the records' labels.

    `center` and `scale` are of numbers, as of `read_words`.
    """
    parts = read_words(data, config, ("train", "validation", "test"), center=center, scale=scale)
    rarity, fitted = fit_words(parts["train"], parts["validation"], config, outputs)
    x, y = weigh(parts["test"], rarity, config)
    return x @ fitted.kernel + fitted.bias, y


def choose_features(train: Examples, validation: Examples, config: WordsConfig, outputs: int) -> Regression:
    """Return the best regression on validation: on words, on letters at places, or on both.

    Records that are of one length without being aligned are then no worse off with places, nor mutants with words.
    """
    whole, words = slice(0, config.size), slice(0, config.words)
    best, least = None, np.inf
    for columns in [whole, words, slice(config.words, config.size)] if config.places else [whole]:
        shown, held = (Examples(part.x[:, columns], part.y) for part in (train, validation))
        found = choose(shown, held, outputs)
        if (error := loss(held.x, held.y, found)) < least:
            kernel = np.zeros((config.size, outputs), found.kernel.dtype)
            kernel[columns] = found.kernel
            best, least = Regression(kernel, found.bias), error
    assert best is not None
    return best


def choose(train: Examples, validation: Examples, outputs: int) -> Regression:
    """Return the regression whose loss on validation is the least, of several penalties."""
    best, least = None, np.inf
    precision = PRECISION["numbers" if outputs == 1 else "classes"]
    for strength in STRENGTHS:
        found = fit(train.x, train.y, outputs, strength, start=best, precision=precision)
        if (error := loss(validation.x, validation.y, found)) > least:
            break
        best, least = found, error
    assert best is not None
    return best


def fit(
    x: Any,
    y: np.ndarray,
    outputs: int,
    strength: float,
    *,
    start: Regression | None = None,
    precision: float = PRECISION["classes"],
) -> Regression:
    """Return the regression with the least Σ ℓ + |W|² / (2 strength), by L-BFGS.

    ℓ is -log p of the class, or half the squared error of one output.

    Args:
      x: words of records.
      y: their classes, or numbers if there is one output.
      outputs: classes, or 1.
      strength: inverse weight of the penalty.
      start: where the search begins; 0 by default.
      precision: see `PRECISION`.
    """
    words, turned = x.shape[1], x.T.tocsr()

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        kernel, bias = _unpacked(flat.astype(np.float32), words, outputs)
        total, slope = _losses(x @ kernel + bias, y)
        gradient = np.concatenate([(turned @ slope + kernel / strength).ravel(), slope.sum(0)])
        return total + float((kernel**2).sum()) / (2 * strength), gradient.astype(np.float64)

    begin = [np.zeros((words + 1) * outputs)] if start is None else [start.kernel.ravel(), start.bias]
    from scipy import optimize  # here, as it takes .1 s to import and few runs fit words

    limits = {"maxiter": MOST_ITERATIONS, "ftol": precision}
    found = optimize.minimize(objective, np.concatenate(begin), jac=True, method="L-BFGS-B", options=limits)
    return Regression(*_unpacked(found.x.astype(np.float32), words, outputs))


def loss(x: Any, y: np.ndarray, fitted: Regression) -> float:
    """Return the mean ℓ of records."""
    return _losses(x @ fitted.kernel + fitted.bias, y)[0] / len(y)


def _unpacked(flat: np.ndarray, words: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    return flat[: words * outputs].reshape(words, outputs), flat[words * outputs :]


def _losses(z: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Return Σ ℓ and its gradient by z."""
    if z.shape[1] == 1:
        error = z - y[:, None].astype(z.dtype)
        return float((error**2).sum() / 2), error
    from scipy.special import logsumexp

    rows, total = np.arange(len(y)), logsumexp(z, axis=1, keepdims=True)
    slope = np.exp(z - total)
    slope[rows, y] -= 1
    return float((total[:, 0] - z[rows, y]).sum()), slope
