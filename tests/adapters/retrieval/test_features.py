"""The six features of sets of neighbours that are small enough to work out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters.retrieval import FEATURES, neighbour_features

E = math.exp
three = jax.jit(neighbour_features)


def features(similar, pairs, present):
    """Of sets of three places, by one program."""
    similar, pairs = (np.asarray(x, np.float32) for x in (similar, pairs))
    found = three(jnp.asarray(similar), jnp.asarray(pairs), jnp.asarray(np.asarray(present, bool)))
    return dict(zip(FEATURES, np.asarray(found).T, strict=True))


APART = np.eye(3)
CLOSE = np.asarray([[1.0, 0.5, 0.2], [0.5, 1.0, -0.1], [0.2, -0.1, 1.0]])
SETS = {
    # s = .6 twice: weights of ranks 0 and 1 cover; c = 0
    "two at right angles": (
        ([0.6, 0.6, -np.inf], APART, [1, 1, 0]),
        (1.0, 0.7, 0.0, 1.0, 0.6, 2 / 3 * E(-0.4)),
    ),
    # softmax of (.8, .2, .2), of which .8 alone is above .3; mean .4, variance .08
    "three": (
        ([0.2, 0.8, 0.2], CLOSE, [1, 1, 1]),
        (
            E(0.8) / (E(0.8) + E(0.2) * (E(-0.1) + E(-0.2))),
            0.7 * (1 - 0.2) + 0.3 * 0.6,
            0.2,
            E(-0.08),
            0.8 * E(-math.sqrt(0.08)),
            E(-0.6),
        ),
    ),
    "one": (([-np.inf, 0.2, -np.inf], CLOSE, [0, 1, 0]), (0.0, 0.0, 1.0, 1.0, 0.2, E(-0.8) / 3)),
    "the same thrice": (([1.0] * 3, np.ones((3, 3)), [1, 1, 1]), (1.0, 0.0, 1.0, 1.0, 1.0, 1.0)),
    "none": (([-np.inf] * 3, np.full((3, 3), 7.0), [0, 0, 0]), (0.0,) * 6),
}


@pytest.mark.parametrize("name", SETS)
def test_hand_made_sets(name):
    given, expected = SETS[name]
    found = features(*(np.asarray(x)[None] for x in given))
    for feature, value in zip(FEATURES, expected, strict=True):
        np.testing.assert_allclose(found[feature], [value], rtol=2e-6, atol=1e-7, err_msg=feature)


def test_the_order_of_neighbours_does_not_matter():
    rng = np.random.default_rng(0)
    similar, present = rng.uniform(-1, 1, (8, 3)), rng.random((8, 3)) < 0.7
    pairs = rng.uniform(-1, 1, (8, 3, 3))
    pairs = pairs + pairs.swapaxes(1, 2)
    order = np.asarray([2, 0, 1])
    one = features(similar, pairs, present)
    other = features(similar[:, order], pairs[:, order][:, :, order], present[:, order])
    for name in FEATURES:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_one_place_for_one_query():
    features = jax.jit(neighbour_features)
    for there in (True, False):
        given = np.full((1, 1), 0.5, np.float32), np.ones((1, 1, 1), np.float32), np.full((1, 1), there)
        found = np.asarray(features(*given))
        assert found.shape == (1, 6)
        np.testing.assert_allclose(
            found[0], np.asarray([1, 0, 1, 1, 0.5, E(-0.5)]) * there, rtol=1e-6, atol=1e-7
        )
