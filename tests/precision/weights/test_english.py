"""The price of fewer bits for a trained run, on a book that it has not read."""

from dataclasses import replace

import pytest

import jaxblt
from jaxblt.answers.quantized import products_of
from jaxblt.data.samples import load_sample
from jaxblt.precision.weights import dense_params, quantize

MOST = {"int8": 0.001, "fp8": 0.003, "int4": 0.02}
"""The share of bits per byte that a scheme may add."""


@pytest.mark.slow(days=28, group="long")
def test_fewer_bits_cost_little(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, book = jaxblt.load("english_patches"), load_sample("book")
    text, products = [book[40_000:44_000], book[100_000:104_000]], products_of(run)
    before = nats_of(run, text)
    for scheme, most in MOST.items():
        # Score rounded weights as arrays: all schemes are one compiled program
        params = dense_params(quantize(run.params, products, scheme), products)
        assert nats_of(replace(run, params=params), text) <= (1 + most) * before, scheme


def nats_of(run, text):
    """In rows that are all full, as an empty one takes as long."""
    return -run.score(text, batch_size=len(text)).log_likelihood.sum()
