"""The regression that a head starts as: scikit-learn's optimum, ridge by its normal equations."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from jaxblt.data import LabelledDataConfig
from jaxblt.models import WordsConfig
from jaxblt.models.word_features import weigh_words
from jaxblt.training.finetune import words_of
from jaxblt.training.start.word_regression import (
    Examples,
    answer_test,
    choose,
    choose_features,
    find_rarity,
    find_ratio,
    fit,
    fit_words,
    loss,
    weigh,
)

RNG = np.random.default_rng(0)
X = csr_matrix(RNG.random((60, 8)) * (RNG.random((60, 8)) < 0.5), dtype=np.float32)
CLASSES = (X[:, 0].toarray()[:, 0] > 0.3) + (X[:, 1].toarray()[:, 0] > 0.4).astype(int)


def test_classes_are_scored_as_by_scikit_learn():
    found = fit(X, CLASSES, 3, 2.0, precision=1e-9)
    wanted = LogisticRegression(C=2.0, tol=1e-8, max_iter=5000).fit(X.toarray(), CLASSES)
    z = X @ found.kernel + found.bias
    np.testing.assert_allclose(z - z.mean(1, keepdims=True), wanted.decision_function(X.toarray()), atol=2e-3)


def test_numbers_are_those_of_ridge():
    y = X.toarray() @ np.arange(8) + RNG.normal(size=60) + 3
    found = fit(X, y, 1, 0.5, precision=1e-12)
    x = np.column_stack([X.toarray(), np.ones(60)]).astype(np.float64)
    penalty = np.diag([2.0] * 8 + [0.0])
    wanted = np.linalg.solve(x.T @ x + penalty, x.T @ y)
    np.testing.assert_allclose(np.append(found.kernel[:, 0], found.bias), wanted, rtol=2e-3, atol=2e-3)


def test_validation_chooses_the_penalty():
    noise = Examples(X, RNG.integers(0, 2, 60))
    told = Examples(X, (X[:, 0].toarray()[:, 0] > 0.3).astype(np.int64))
    tied = choose(noise, Examples(X, 1 - noise.y), 2)
    free = choose(told, told, 2)
    assert np.abs(tied.kernel).max() < 0.1 * np.abs(free.kernel).max()
    assert loss(X, told.y, free) < 0.2


def test_validation_chooses_whether_letters_at_places_count():
    """Places that tell nothing are left out: their kernel is 0, and the answer that of words alone."""
    config = WordsConfig(longest=1, places=1)  # four words, then four letters at the first place
    word, place = X[:, 0].toarray()[:, 0] > 0.3, X[:, 5].toarray()[:, 0] > 0.3
    rest = RNG.integers(0, 2, 60)
    of_place = choose_features(
        Examples(X, place.astype(np.int64)), Examples(X, place.astype(np.int64)), config, 2
    )
    assert loss(X, place.astype(np.int64), of_place) < 0.3
    noisy = csr_matrix(np.concatenate([X[:, :4].toarray(), RNG.random((60, 4)) * 9], 1), dtype=np.float32)
    shuffled = csr_matrix(np.concatenate([X[:, :4].toarray(), RNG.random((60, 4)) * 9], 1), dtype=np.float32)
    y = np.where(RNG.random(60) < 0.2, rest, word).astype(np.int64)
    of_words = choose_features(Examples(noisy, y), Examples(shuffled, word.astype(np.int64)), config, 2)
    assert not np.any(of_words.kernel[4:])
    plain = choose(Examples(noisy[:, :4], y), Examples(shuffled[:, :4], word.astype(np.int64)), 2)
    np.testing.assert_array_equal(of_words.kernel[:4], plain.kernel)


def test_numbers_are_fitted_to_the_end():
    """Wherever all features are small an iteration gains little of the loss, which once ended the fit."""
    x = csr_matrix(RNG.random((200, 40)) * np.geomspace(1, 1e-2, 40), dtype=np.float32)
    y = (x @ RNG.normal(size=40) + x[:, 30:] @ RNG.normal(size=10) * 100 + RNG.normal(size=200)).astype(float)
    y = (y - y.mean()) / y.std()
    part = Examples(x, y)
    found, wanted = choose(part, part, 1), fit(x, y, 1, 100.0, precision=1e-9)
    assert loss(x, y, found) == pytest.approx(loss(x, y, wanted), rel=1e-2)


COUNTS = csr_matrix(RNG.poisson(0.7, (40, 20)), dtype=np.float32)
WORDS = WordsConfig(longest=2)


def test_sparse_words_are_weighed_as_a_head_weighs_them():
    rarity = find_rarity(COUNTS)
    found = weigh(Examples(COUNTS, np.zeros(40)), rarity, WORDS).x.toarray()
    wanted = weigh_words(jnp.asarray(COUNTS.toarray()), jnp.asarray(rarity, jnp.float32), WORDS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert COUNTS.max() > 1  # the counts are as they were


def test_ratios_by_hand():
    """Words of one letter: the first class has A in one record of two, the second one C in both."""
    counts = np.zeros((4, 4), np.float32)
    counts[0, 0], counts[2, 1], counts[3, 1] = 5, 1, 2
    found = find_ratio(csr_matrix(counts), np.array([0, 0, 1, 1]), WordsConfig(longest=1))
    np.testing.assert_allclose(found, np.log([(2 / 5) / (1 / 6), (3 / 6) / (1 / 5), 6 / 5, 6 / 5]))


def test_validation_chooses_how_words_of_two_classes_are_weighed():
    """Many words that say nothing drown two that tell, unless words are weighed by what classes have of them."""
    rng = np.random.default_rng(1)
    y = np.arange(120) % 2
    counts = rng.poisson(0.5, (120, 20)).astype(np.float32)
    counts[:, 0], counts[:, 1] = y * rng.poisson(1.5, 120), (1 - y) * rng.poisson(1.5, 120)
    train, held = (Examples(csr_matrix(counts[own]), y[own]) for own in (slice(0, 80), slice(80, None)))
    weight, found = fit_words(train, held, WORDS, 2)
    np.testing.assert_array_equal(weight, find_ratio(train.x, train.y, WORDS))
    shown, other = (weigh(part, find_rarity(train.x), WORDS) for part in (train, held))
    plain = choose_features(shown, other, WORDS, 2)
    assert loss(weigh(held, weight, WORDS).x, held.y, found) < loss(other.x, held.y, plain)
    numbers = Examples(train.x, train.y.astype(float))
    np.testing.assert_array_equal(fit_words(numbers, numbers, WORDS, 1)[0], find_rarity(train.x))


@pytest.mark.slow(days=28, group="costly")
def test_texts_are_answered_by_their_phrases(tmp_path):
    """Which of two words comes first tells the class."""
    rows = [f"a{i} {'not good' if i % 2 else 'good not'} b{i},{i % 2}" for i in range(60)]
    (tmp_path / "texts.csv").write_text("\n".join(["sequence,label", *rows]) + "\n")
    options = {"paths": (f"{tmp_path}/texts.csv",), "seq_len": 32, "batch_size": 8, "classes": ("0", "1")}
    data = LabelledDataConfig(fractions=(0.6, 0.2, 0.2), **options)
    words = words_of(data)
    assert words == WordsConfig("phrases", 3)
    found, classes = answer_test(data, words, 2)
    np.testing.assert_array_equal(found.argmax(1), classes)
