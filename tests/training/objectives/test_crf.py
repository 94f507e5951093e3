"""A linear-chain CRF against sums over all rows of classes, with a gap, padding and an empty row."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxblt.data.batch import Batch
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.models.label_head import LabelHead, LabelHeadConfig
from jaxblt.models.labeller import LabellerConfig
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.training.objectives.crf import log_partition, path_score, viterbi
from jaxblt.training.objectives.objectives import ClassifyChain, ClassifyPositions
from jaxblt.training.recipe import Recipe
from tests.finetuning import MODEL

THERE = np.array([[0, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool)
KINDS = 3


def potentials_of(seed=0):
    return np.random.default_rng(seed).normal(size=(*THERE.shape, KINDS + 1, KINDS)).astype(np.float32)


def scores(potentials, there):
    """Every row of classes of the positions that are there, with its score."""
    places = np.flatnonzero(there)
    for row in product(range(KINDS), repeat=len(places)):
        before = (KINDS, *row)
        yield row, sum(float(potentials[t, before[n], row[n]]) for n, t in enumerate(places))


def test_sums_and_best_rows_are_those_of_brute_force():
    potentials = potentials_of()
    total = jax.jit(log_partition)(potentials, THERE)
    best = np.asarray(jax.jit(viterbi)(potentials, THERE))
    for b, there in enumerate(THERE):
        every = dict(scores(potentials[b], there))
        assert float(total[b]) == pytest.approx(logsumexp(list(every.values())), abs=1e-5)
        assert tuple(best[b, there]) == max(every, key=every.__getitem__)


def test_probabilities_of_all_rows_sum_to_one():
    potentials, there = jax.device_put((potentials_of(1)[1:2], THERE[1:2]))
    rows = np.array([[9, i, 9, j, 9] for i, j in product(range(KINDS), repeat=2)], np.int32)
    score = jax.jit(jax.vmap(lambda row: path_score(potentials, row[None], there)[0]))(rows)
    total = np.exp(np.asarray(score) - np.asarray(jax.jit(log_partition)(potentials, there))).sum()
    assert total == pytest.approx(1, abs=1e-5)
    every = dict(scores(np.asarray(potentials[0]), THERE[1]))
    assert np.asarray(score) == pytest.approx(list(every.values()), abs=1e-5)


def test_gradients_are_the_chance_of_each_pair():
    """d log Z / d φ[t, i, j] = P(y_{t-1} = i, y_t = j), so they sum to 1 at each position that is there."""
    chances = jax.jit(jax.grad(lambda x, there: log_partition(x, there).sum()))(potentials_of(2), THERE)
    chances = np.asarray(chances)
    assert chances.sum((2, 3)) == pytest.approx(THERE.astype(float), abs=1e-5)
    assert (chances[0, 1, :KINDS] == 0).all()
    assert (chances[0, 2, KINDS] == 0).all()


def test_figures_of_a_chain_are_of_its_best_rows():
    potentials, labels = potentials_of(3), np.where(THERE, 1, -1).astype(np.int32)
    segments = jax.device_put(np.ones(THERE.shape, np.int32))
    batch = Batch(segments, segments, segments, segments, segments, labels=jax.device_put(labels))
    objective = ClassifyChain()
    found = objective.figures(jax.jit(objective.sums)(potentials, batch))
    chances, hits = 0.0, 0
    for b, there in enumerate(THERE):
        every = dict(scores(potentials[b], there))
        chances += logsumexp(list(every.values())) - every[(1,) * there.sum()]
        hits += sum(y == 1 for y in max(every, key=every.__getitem__))
    assert float(found["loss"]) == pytest.approx(chances / THERE.sum(), rel=1e-5)
    assert float(found["accuracy"]) == pytest.approx(hits / THERE.sum())


def test_the_head_adds_what_comes_behind_what():
    head = LabelHead(LabelHeadConfig(target="positions", outputs=2, crf=True), causal=True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32))
    behind = jnp.asarray([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    params = {"outputs": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}, "transitions": behind}
    found = head.apply({"params": params}, x, jnp.full((1, 3), 9, jnp.int32), None)
    assert np.asarray(found) == pytest.approx(
        np.asarray(x).sum(-1)[..., None, None] + np.asarray(behind), abs=1e-5
    )


def test_a_chain_needs_its_head_and_whole_rows():
    with pytest.raises(ValueError, match="target is 'class': set target='positions'"):
        LabelHeadConfig(crf=True)
    data = LabelledDataConfig(paths=("r.csv",), target="positions", classes=("a", "b"))
    model = LabellerConfig(MODEL, LabelHeadConfig(target="positions", crf=True))
    with pytest.raises(ValueError, match=r"head\.crf is True and the objective is ClassifyPositions"):
        Recipe(name="r", model=model, data=data, objective=ClassifyPositions())
    with pytest.raises(ValueError, match=r"mesh\.seq is 2: set it to 1"):
        Recipe(name="r", model=model, data=data, objective=ClassifyChain(), mesh=MeshConfig(seq=2))
