"""Guesses of the next chunk's code."""

import dataclasses

import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig
from jaxblt.adapters.code.experimental.guess import Guess
from tests.adapters.routing import DOCUMENTS, in_calls, inputs, params_of, sown, whole, with_holes

CHUNK = 3
EXACT = AdapterConfig(rank=2, router=RouterConfig(chunk=CHUNK, reads=(ChunkMean(),), hidden=4))


def guessing(tau):
    return dataclasses.replace(EXACT, code=(Guess(tau),))


def loop(codes, ids, trend, tau):
    """Codes chunk by chunk, the number of guesses, and how many were accepted."""
    expected, tried, hits = codes.copy(), 0, 0
    for row in range(len(ids)):
        for s in np.unique(np.abs(ids[row][ids[row] != 0])):
            places = np.flatnonzero(np.abs(ids[row]) == s)
            before = []
            for first in range(CHUNK, len(places), CHUNK):
                here = [t for t in places[first : first + CHUNK] if ids[row, t] > 0]
                if not here or ids[row, places[first]] < 0:
                    continue
                code = codes[row, here[0]]
                if before:
                    guess = before[-1] + (trend * (before[-1] - before[-2]) if len(before) > 1 else 0)
                    accepted = guess @ code > tau * np.linalg.norm(guess) * np.linalg.norm(code)
                    tried, hits = tried + 1, hits + accepted
                    if accepted:
                        expected[row, here] = guess
                before.append(code)
    return expected, tried, hits


@pytest.mark.slow(days=28, group="costly")
def test_a_guess_that_is_near_stands_for_the_code_and_others_are_exact():
    ids, x, tau = DOCUMENTS, inputs(), 0.8
    config = guessing(tau)
    params = params_of(config)
    own = {name: leaf for name, leaf in params.items() if name != "guess_0_trend"}
    exact = whole(EXACT, own, x, ids)
    (codes, _), side = sown(config, params, x, ids)
    expected, tried, hits = loop(exact, ids, np.asarray(params["guess_0_trend"]), tau)
    np.testing.assert_allclose(codes, expected, atol=1e-5)
    assert 0 < hits < tried
    np.testing.assert_array_equal(side["metrics"]["guesses"][0].value, [tried, hits])
    same = np.all(expected == exact, -1) & (ids > 0)
    np.testing.assert_array_equal(np.asarray(codes)[same], exact[same])
    assert same.any()


@pytest.mark.slow(days=28, group="costly")
def test_calls_guess_as_whole_rows_do():
    ids, x, config = with_holes(DOCUMENTS), inputs(), guessing(0.8)
    params = params_of(config)
    found = in_calls(config, params, x, ids)
    np.testing.assert_allclose(found, whole(config, params, x, ids), atol=1e-5)


def test_a_level_without_chunks_is_refused():
    with pytest.raises(ValueError, match="Guess is of the next chunk's code, and the level is 'token'"):
        dataclasses.replace(guessing(0.5), router=RouterConfig("token", chunk=CHUNK, reads=(ChunkMean(),)))
