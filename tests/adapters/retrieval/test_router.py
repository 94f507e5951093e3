"""A router with an index: whose chunks it finds and when, in whole rows, packed rows and calls."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Neighbours, Prefix, RouterConfig, join_params
from jaxblt.adapters.code.batch_documents import of_slots
from jaxblt.adapters.code.router import Router
from jaxblt.adapters.retrieval import make_index, neighbour_features
from jaxblt.adapters.update.params import split_params, without_index
from jaxblt.answers.index import chunk_vectors
from tests.adapters.routing import DOCUMENTS, WIDTH, in_calls, inputs, params_of, passes, whole, with_holes

CHUNK, NEIGHBOURS, CAPACITY = 5, 3, 40
CONFIG = AdapterConfig(
    rank=3,
    router=RouterConfig(
        chunk=CHUNK, reads=(ChunkMean(), Neighbours(capacity=CAPACITY, count=NEIGHBOURS), Prefix(3)), hidden=4
    ),
)
KEYS = np.where(DOCUMENTS > 0, DOCUMENTS * 1000 + 7, 0).astype(np.int32)
"""Of the documents of both rows."""


@cache
def made():
    """An index of 25 chunks of other text and those of the document of row 0 that has 26 tokens, whose key is last."""
    rng = np.random.default_rng(3)
    others = rng.standard_normal((1, 25 * CHUNK, WIDTH)).astype(np.float32)
    of = jax.jit(lambda x: chunk_vectors(x, jnp.ones(x.shape[:2], jnp.int32), CHUNK)[0][0])
    rows = [np.asarray(of(x)) for x in (others, inputs())]
    own = rows[1][:5]
    vectors = np.concatenate([rows[0], own])
    owners = np.asarray([1] * 25 + [KEYS[0, 0]] * len(own))
    return make_index(vectors, owners, base="", stack="stack", chunk=CHUNK, neighbours=NEIGHBOURS)


@cache
def params(kept=30, config=CONFIG):
    """Of a router with the first chunks of that index."""
    arrays = made().params(CAPACITY)
    arrays["vectors"] = np.where(np.arange(CAPACITY)[:, None] < kept, arrays["vectors"], 0)
    return params_of(config) | {"index": jax.device_put(arrays)}


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_router")
def test_the_code_is_f_of_the_chunk_before_and_its_neighbours():
    """By hand for the first document: query, search, norms, and the two layers."""
    code, p = whole(CONFIG, params(), inputs(), DOCUMENTS), jax.tree.map(np.asarray, params())
    x = inputs()[0, :26]
    bare = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
    index, scale = p["index"], p["norm"]["scale"]
    score = np.exp(10 * np.tanh((bare[:3] * scale) @ p["query"] / WIDTH**0.5 / 10))
    prefix = scale * (score[:, None] * bare[:3]).sum(0) / score.sum()
    base = bare[:25].reshape(5, CHUNK, WIDTH).mean(1)
    apart = base - index["center"]
    scores = apart / np.linalg.norm(apart, axis=1, keepdims=True) @ index["vectors"][:30].T
    place = np.argsort(-scores, 1)[:, :NEIGHBOURS]
    np.testing.assert_array_equal(place[:, 0], np.arange(25, 30))
    there = index["vectors"][place]
    similar, pairs = np.take_along_axis(scores, place, 1), there @ there.swapaxes(1, 2)
    features = jax.jit(neighbour_features)(similar, pairs, np.ones(place.shape, bool))
    normed = np.clip((np.asarray(features) - index["norms"][0]) / index["norms"][1], -3, 3)
    for k in range(1, 6):
        read = np.concatenate([base[k - 1] * scale, normed[k - 1], prefix])
        f = read @ p["hidden"]["kernel"] + p["hidden"]["bias"]
        expected = 1 + (f / (1 + np.exp(-f))) @ p["code"]["kernel"] + p["code"]["bias"]
        here = code[0, k * CHUNK : min((k + 1) * CHUNK, 26)]
        np.testing.assert_allclose(here, np.broadcast_to(expected, here.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_router")
def test_codes_are_causal_and_the_same_in_any_split():
    ids = with_holes(DOCUMENTS)
    code = whole(CONFIG, params(), inputs(), ids)
    np.testing.assert_allclose(in_calls(CONFIG, params(), inputs(), ids), code, atol=2e-5)
    for last in (24, 29):  # the last tokens of two chunks
        changed = inputs()
        changed[:, last:] += 1
        np.testing.assert_array_equal(
            whole(CONFIG, params(), changed, ids)[:, : last + 1], code[:, : last + 1]
        )
    assert np.abs(whole(CONFIG, params(), changed, ids) - code)[:, 30:].max() > 1e-2


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_router")
def test_packed_documents_have_the_codes_that_they_have_apart():
    """Each document's key goes with it; the first document of a row stays, the second moves to the front."""
    code = whole(CONFIG, params(), inputs(), DOCUMENTS, documents=KEYS)
    x, ids, keys = inputs(), DOCUMENTS.copy(), KEYS.copy()
    x[0], ids[0], keys[0] = (
        np.roll(x[0], -26, 0),
        np.roll(np.where(ids[0] == 2, 2, 0), -26),
        np.roll(keys[0], -26),
    )
    apart = whole(CONFIG, params(), x, ids, documents=keys)
    np.testing.assert_allclose(apart[0, :14], code[0, 26:], rtol=1e-5, atol=2e-5)
    assert np.abs(code[0, 26:]).max() > 0.1


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_router")
def test_a_document_is_not_its_own_neighbour():
    """Told the key of a document, the router does as with an index that lacks it; not told, it finds the document."""
    code = whole(CONFIG, params(), inputs(), DOCUMENTS, documents=KEYS)
    without = whole(CONFIG, params(kept=25), inputs(), DOCUMENTS, documents=KEYS)
    np.testing.assert_array_equal(code[0, :26], without[0, :26])
    leaking = whole(CONFIG, params(), inputs(), DOCUMENTS)
    first = (DOCUMENTS[0] == 1) & (np.arange(40) >= CHUNK)
    assert np.abs(leaking - code)[0, first].max(-1).min() > 1e-3


def test_the_router_learns_what_to_make_of_neighbours_and_the_index_stays():
    given = params()

    def loss(trained):
        variables = {"params": given | trained}
        return jnp.sum(Router(CONFIG).apply(variables, jnp.asarray(inputs()))[0] ** 2)  # pyright: ignore

    kernel = jax.jit(jax.grad(loss))({"hidden": given["hidden"]})["hidden"]["kernel"]
    assert np.abs(np.asarray(kernel))[WIDTH : WIDTH + 6].max(1).min() > 1e-3
    base, trained = split_params({"stack": {"rest": {}, "router": given}})
    assert base["stack"]["router"].keys() == {"index"}
    assert "index" not in trained["stack"]["router"]
    assert join_params(base, trained)["stack"]["router"].keys() == given.keys()
    assert without_index(base) == {"stack": {"rest": {}}}
    assert split_params(base)[1] == {}


def test_an_empty_index_gives_finite_codes():
    code = whole(CONFIG, params(kept=0), inputs(), DOCUMENTS)
    assert np.isfinite(code).all()
    assert passes(CONFIG)._cache_size() <= 3


@pytest.mark.slow(days=28, group="costly", turn="adapters/retrieval/test_router")
def test_tokens_of_the_first_chunk_know_no_neighbours():
    token = replace(CONFIG, router=replace(CONFIG.router, level="token"))
    full, empty = (whole(token, params(kept, token), inputs(), DOCUMENTS) for kept in (30, 0))
    moved, first = np.abs(full - empty).max(-1)[0], np.arange(40) % 26 < CHUNK
    assert moved[first].max() == 0
    assert moved[~first].min() > 1e-3


def test_a_chunk_of_holes_has_no_neighbours():
    ids = DOCUMENTS.copy()
    ids[0, CHUNK : 2 * CHUNK] *= -1
    full, empty = (whole(CONFIG, params(kept), inputs(), ids) for kept in (30, 0))
    moved = np.abs(full - empty).max(-1)[0].reshape(-1, CHUNK)[:5]
    assert moved[[0, 1, 2]].max() == 0
    assert moved[[3, 4]].min() > 1e-3


def test_slots_have_the_document_of_their_block():
    documents = jnp.asarray([[3, 3, 3, 3, 9, 9, 0, 0], [5] * 8], jnp.int32)
    np.testing.assert_array_equal(of_slots(documents, 6, 4), [[3, 3, 3, 9, 9, 9], [5] * 6])
    assert of_slots(documents, 8, 4) is documents
