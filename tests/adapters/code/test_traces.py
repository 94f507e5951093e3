"""Traces, a router's memory that knows the order of tokens: as a loop, and over any split of documents with holes."""

import jax
import numpy as np
import pytest
from scipy.special import expit as sigmoid

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, Traces
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.code.traces import TAPS
from tests.adapters.routing import (
    DOCUMENTS,
    TURNS,
    WIDTH,
    in_calls,
    inputs,
    params_of,
    whole,
    with_holes,
)

CHUNK, HIDDEN = 5, 4
WHOLE_TOKEN = {"rtol": 2e-4, "atol": 2e-5}


def over(level, **options):
    return AdapterConfig(
        rank=3,
        router=RouterConfig(
            level=level, chunk=CHUNK, reads=(ChunkMean(), Traces()), hidden=HIDDEN, **options
        ),
    )


def looped(tree, h):
    """The traces of one document without holes, a token at a time."""
    kernel, keep, found = tree["memory"]["kernel"], sigmoid(tree["memory_decay"]), []
    s = np.zeros(HIDDEN)
    for t in range(len(h)):
        u = tree["memory_bias"] + sum(h[t - w] @ kernel[:, w] for w in range(TAPS) if w <= t)
        s = keep * s + u * sigmoid(u)
        found.append(s * np.sqrt(1 - keep**2))
    return np.stack(found)


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_traces", every="token")
@pytest.mark.parametrize("level", ["chunk", "token"])
def test_traces_are_decayed_sums_of_a_short_convolution(level):
    """A chunk's code reads those of its first token, a token's code its own."""
    config = over(level)
    params = params_of(config)
    code, tree = whole(config, params, inputs(), DOCUMENTS), jax.tree.map(np.asarray, params)
    h = inputs() / np.sqrt(np.mean(inputs() ** 2, -1, keepdims=True) + 1e-6) * tree["norm"]["scale"]
    for row, ids in enumerate(DOCUMENTS):
        for s in np.unique(ids[ids > 0]):
            own = h[row, ids == s]
            traces, expected = looped(tree, own), np.ones((len(own), 3))
            for t in range(len(own)):
                first = t // CHUNK * CHUNK
                if level == "chunk" and first == 0:
                    continue
                mean = own[first - CHUNK : first].mean(0) if first else np.zeros(WIDTH)
                parts = [mean, traces[first]] if level == "chunk" else [own[t], mean, traces[t]]
                f = np.concatenate(parts) @ tree["hidden"]["kernel"] + tree["hidden"]["bias"]
                expected[t] = 1 + (f * sigmoid(f)) @ tree["code"]["kernel"] + tree["code"]["bias"]
            np.testing.assert_allclose(code[row, ids == s], expected, **WHOLE_TOKEN)


@TURNS
def test_codes_of_traces_are_the_same_in_any_split():
    config, ids = over(Mixed(("chunk", "token"))), with_holes(DOCUMENTS)
    params = params_of(config)
    code = whole(config, params, inputs(), ids)
    np.testing.assert_allclose(in_calls(config, params, inputs(), ids), code, rtol=2e-6, atol=2e-6)
    changed = inputs()
    changed[:, 30:] += 1
    other = whole(config, params, changed, ids)
    np.testing.assert_array_equal(other[:, :30], code[:, :30])
    assert np.abs(other[:, 30:] - code[:, 30:]).max() > 1e-2


@pytest.mark.slow(days=28, group="costly")
def test_the_order_of_tokens_counts():
    """Two tokens of a chunk that change places leave its mean, and move the code of the next chunk."""
    config = over("chunk")
    params, swapped = params_of(config), inputs()
    swapped[0, [1, 2]] = swapped[0, [2, 1]]
    moved = whole(config, params, swapped, DOCUMENTS) - whole(config, params, inputs(), DOCUMENTS)
    assert np.abs(moved[0, CHUNK : 2 * CHUNK]).min() > 1e-4
