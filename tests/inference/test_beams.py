"""A beam search finds what trying everything finds, if its beams suffice; one beam is greedy."""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import EOS, OFFSET
from jaxblt.inference import SamplingConfig, beam_search, generate
from tests.inference.test_drafts import decoding

ALPHABET, LENGTH, PROMPT = b"ab", 3, b"abcab"


def nats_of_all(decoder, params):
    """Log-likelihood of every continuation of up to three bytes of the alphabet, EOS included where one ends."""
    whole = list(itertools.product(ALPHABET, repeat=LENGTH))
    ids = [[1, *(byte + OFFSET for byte in PROMPT + bytes(text))] for text in whole]
    logits = decoder.build().apply({"params": params["model"]}, jnp.asarray(ids))[0]
    log_p = np.asarray(logits, np.float64)[:, len(PROMPT) :]
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    found = {}
    for text, row in zip(whole, log_p, strict=True):
        steps = [row[i, byte + OFFSET] for i, byte in enumerate(text)]
        found[bytes(text), False] = sum(steps)
        for n in range(LENGTH):
            found[bytes(text[:n]), True] = sum(steps[:n]) + row[n, EOS]
    return found


@pytest.mark.slow(days=7, group="weekly")
def test_enough_beams_find_everything_and_few_the_best_of_their_own():
    decoder, params = decoding("attention")
    expected = nats_of_all(decoder, params)
    options = {"max_new_bytes": LENGTH, "alphabet": ALPHABET}
    found = beam_search(decoder, params, PROMPT, beams=16, **options)
    assert {(beam.data, beam.ended) for beam in found} == set(expected)
    for beam in found:
        np.testing.assert_allclose(beam.log_likelihood, expected[beam.data, beam.ended], rtol=1e-4, atol=1e-4)
    sums = [beam.log_likelihood for beam in found]
    assert sums == sorted(sums, reverse=True)
    by_byte = beam_search(decoder, params, PROMPT, beams=16, length_exponent=1.0, **options)
    means = [beam.log_likelihood / (len(beam.data) + beam.ended) for beam in by_byte]
    assert means == sorted(means, reverse=True)
    assert {beam.data for beam in by_byte} == {beam.data for beam in found}


@pytest.mark.slow(days=28, group="costly", turn="inference/test_beams")
def test_one_beam_is_greedy():
    decoder, params = decoding("attention")
    options = {"max_new_bytes": 40, "alphabet": b"abc"}
    [beam] = beam_search(decoder, params, PROMPT, beams=1, **options)
    greedy = SamplingConfig(temperature=0)
    assert [beam.data] == generate(decoder, params, [PROMPT], sampling=greedy, **options)
    assert beam.ended == (len(beam.data) < 40)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beams": 0}, "beams must lie in 1..256, got 0"),
        ({"length_exponent": -1.0}, "length_exponent must lie in 0..10, got -1.0"),
        ({"length_exponent": 11}, "length_exponent must lie in 0..10, got 11"),
    ],
)
def test_bad_options_are_told(options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        beam_search(*decoding("attention"), PROMPT, max_new_bytes=3, **options)
