"""Levels that are mixed, a memory over chunks, and side features, over any split of documents with holes."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Ema,
    Prefix,
    RecurrentMemory,
    RouterConfig,
    Side,
    Sticky,
)
from jaxblt.adapters.code.experimental.mixed import Mixed, level_weights
from jaxblt.adapters.code.levels import can_change
from jaxblt.models import Stack, StackConfig
from tests.adapters.routing import (
    DOCUMENTS,
    LENGTH,
    TURNS,
    in_calls,
    inputs,
    params_of,
    sown,
    whole,
    with_holes,
)

CHUNK, PREFIX = 5, 3
ROUTER = RouterConfig(level="chunk", chunk=CHUNK, reads=(ChunkMean(), Prefix(PREFIX)), hidden=4)
FREE = AdapterConfig(rank=3, router=ROUTER)


def over(**options):
    return dataclasses.replace(FREE, router=dataclasses.replace(ROUTER, **options))


def times():
    """Steps of each token's document before it; -1 at padding."""
    found = np.full(DOCUMENTS.shape, -1)
    for row, ids in enumerate(DOCUMENTS):
        for s in np.unique(ids[ids > 0]):
            found[row, ids == s] = np.arange(np.count_nonzero(ids == s))
    return found


def sides():
    """Side features of each token, which differ within a chunk."""
    return np.random.default_rng(11).standard_normal((*DOCUMENTS.shape, 2)).astype(np.float32)


CASES = {
    "gate": (
        dataclasses.replace(
            over(
                level=Mixed(prices=(0.0, 0.1, 0.2)),
                reads=(ChunkMean(), RecurrentMemory(), Side(2), Prefix(PREFIX)),
                lag=2,
            ),
            code=(Ema(0.5),),
        ),
        {"side": sides()},
    ),
    "length": (over(level=Mixed(("prefix", "chunk"), "length", (7.0,))), {}),
}


@TURNS
@pytest.mark.parametrize("name", ["length", "gate"])
def test_codes_are_the_same_in_any_split(name):
    config, given = CASES[name]
    params, ids = params_of(config, **given), with_holes(DOCUMENTS)
    code = whole(config, params, inputs(), ids, **given)
    np.testing.assert_allclose(in_calls(config, params, inputs(), ids, **given), code, atol=2e-6)
    changed = inputs()
    changed[:, 30:] += 1
    other = whole(config, params, changed, ids, **given)
    np.testing.assert_array_equal(other[:, :30], code[:, :30])
    assert np.abs(other[:, 30:] - code[:, 30:]).max() > 1e-2


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_levels")
def test_equal_tokens_have_equal_codes():
    """A document of one vector has one code as soon as its first chunk and its prefix are whole."""
    config, x, time = over(level="token"), inputs(), times()
    for row, ids in enumerate(DOCUMENTS):
        for s in np.unique(ids[ids > 0]):
            x[row, ids == s] = x[row, ids == s][0]
    code = whole(config, params_of(config), x, DOCUMENTS)
    found = [
        code[row, (ids == s) & (time[row] >= CHUNK)]
        for row, ids in enumerate(DOCUMENTS)
        for s in set(ids) - {0}
    ]
    for codes in found:
        np.testing.assert_allclose(codes, codes[:1].repeat(len(codes), 0), rtol=1e-5, atol=1e-6)
    assert np.ptp([codes[0] for codes in found], 0).min() > 1e-2
    assert np.abs(code[0, 0] - code[0, CHUNK]).max() > 1e-2


@pytest.mark.slow(days=28, group="costly")
def test_a_memory_whose_first_step_ends_a_call_is_kept():
    """The loop of a call of 6 tokens has room for a second step, which stands for nothing."""
    config = over(reads=(ChunkMean(), RecurrentMemory()))
    params, ids = params_of(config), np.ones(DOCUMENTS.shape, np.int32)
    code = whole(config, params, inputs(), ids)
    np.testing.assert_allclose(in_calls(config, params, inputs(), ids, size=CHUNK + 1), code, atol=2e-6)


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_levels")
def test_levels_take_turns_by_the_length_so_far():
    """Below 7 steps stands the prefix's code, from the chunk on that begins at 7 or later the chunk's."""
    config, _ = CASES["length"]
    params = params_of(config)
    code, time = whole(config, params, inputs(), DOCUMENTS), times()
    alone = {}
    for level in ("prefix", "chunk"):
        own = {name.removesuffix(f"_{level}"): tree for name, tree in params.items() if name in shared(level)}
        alone[level] = whole(over(level=level), own, inputs(), DOCUMENTS)
    early = time // CHUNK * CHUNK < 7
    expected = np.where(early[..., None], alone["prefix"], alone["chunk"])
    np.testing.assert_allclose(code, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(alone["prefix"] - alone["chunk"])[time >= 0].max() > 0.1


def shared(level):
    return {"norm", "query", f"hidden_{level}", f"code_{level}"}


def test_an_unsure_first_level_hands_over():
    """The entropy of softmax(f) of the first level decides; where it has no code yet it is unsure."""
    config = RouterConfig(
        level=Mixed(("prefix", "token"), "entropy", (0.5,)), reads=(ChunkMean(), Prefix(2)), chunk=4
    )
    sure, unsure = [9.0, 0.0, 0.0], [0.1, 0.0, 0.0]
    scores = jnp.asarray([[sure, sure, sure, unsure]])
    time = jnp.arange(4, dtype=jnp.int32)[None]
    found = level_weights(config, [scores, scores], None, time)
    np.testing.assert_array_equal(found[0, :, 0], [0, 0, 1, 0])
    np.testing.assert_array_equal(found.sum(-1), 1)


@pytest.mark.parametrize("at", [4.0, 7.0, 14.0])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_transforms_are_told_wherever_levels_take_turns(lag, at):
    """With a lag the length may hand over to chunks before these have a code, and the fallback is a change, too."""
    config = over(level=Mixed(("prefix", "chunk"), "length", (at,)), lag=lag).router
    time = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    weights = np.asarray(level_weights(config, [jnp.zeros((1, LENGTH, 3))] * 2, None, time))[0, :, 1]
    chunk, place = np.arange(LENGTH) // CHUNK, np.arange(LENGTH)
    of_chunk = np.where(chunk >= lag, 1 + chunk, -1)
    code = np.where(weights > 0, of_chunk, np.where(place >= PREFIX, 0, -1))
    told = np.asarray(can_change(config, time, None))[0]
    assert set(place[1:][code[1:] != code[:-1]]) <= set(place[told])
    assert set(place[told]) <= {PREFIX, *range(0, LENGTH, CHUNK)}


def test_no_expert_is_chosen_of_a_level_without_a_code():
    """From step 5 on chunks count, which have no code before step 15; the prefix's, from step 10 on, does not count."""
    router = dataclasses.replace(
        ROUTER,
        level=Mixed(("prefix", "chunk"), "length", (4.0,)),
        lag=3,
        reads=(ChunkMean(), Prefix(2 * CHUNK)),
    )
    config = AdapterConfig(rank=2, blocks=2, router=router, code=(Sticky(0.0),))
    code, time = whole(config, params_of(config), inputs(), DOCUMENTS), times()
    early, late = (time >= 0) & (time < 3 * CHUNK), time >= 3 * CHUNK
    np.testing.assert_array_equal(code[early], 0.5)
    np.testing.assert_array_equal(np.sort(code[late], -1), np.tile([0.0, 1.0], (late.sum(), 1)))


@TURNS
def test_a_gate_pays_for_each_level():
    """Its loss is the mean weight of each level times its price, over tokens alone."""
    config, given = CASES["gate"]
    params, ids = params_of(config, **given), with_holes(DOCUMENTS)
    _, side = sown(config, params, inputs(), ids, **given)
    (price,), (shares,) = side["losses"]["level_price"], side["metrics"]["level_shares"]
    np.testing.assert_allclose(shares.value.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(price, shares.value @ np.asarray([0.0, 0.1, 0.2]), rtol=1e-6)
    assert shares.value.min() > 0.01


def test_the_memory_takes_a_step_a_chunk():
    """It is a loop over the chunks' means in each document, from the parameters of the router."""
    config = over(reads=(ChunkMean(), RecurrentMemory()))
    params, ids = params_of(config), DOCUMENTS
    x, time = inputs(), times()
    code = whole(config, params, x, ids)
    tree = jax.tree.map(np.asarray, params)
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * tree["norm"]["scale"]
    for row in range(len(ids)):
        for s in np.unique(ids[row][ids[row] > 0]):
            place = np.flatnonzero(ids[row] == s)
            state = np.zeros(tree["memory_bias"].shape, np.float32)
            for start, stop in pairwise([*range(0, len(place), CHUNK), len(place)]):
                expected = np.ones(3)
                if start:
                    mean = h[row, place[start - CHUNK : start]].mean(0)
                    u = np.einsum("d,dhgk->ghk", mean, tree["memory"]["kernel"]) + tree["memory"][
                        "bias"
                    ].swapaxes(0, 1)
                    r, z, n = np.einsum("hk,hgkj->ghj", state, tree["memory_recurrent"])
                    reset, keep = sigmoid(u[0] + r), sigmoid(u[1] + z)
                    state = (1 - keep) * np.tanh(u[2] + reset * (n + tree["memory_bias"])) + keep * state
                    f = (
                        np.concatenate([mean, state.ravel()]) @ tree["hidden"]["kernel"]
                        + tree["hidden"]["bias"]
                    )
                    expected = 1 + (f * sigmoid(f)) @ tree["code"]["kernel"] + tree["code"]["bias"]
                np.testing.assert_allclose(
                    code[row, place[start:stop]],
                    np.broadcast_to(expected, (stop - start, 3)),
                    rtol=2e-4,
                    atol=2e-5,
                )
    assert time.max() > 4 * CHUNK


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_levels")
def test_a_chunk_reads_the_side_features_of_its_first_token():
    config = over(reads=(ChunkMean(), Side(2), Prefix(PREFIX)))
    params, given = params_of(config, side=sides()), sides()
    code, time = whole(config, params, inputs(), DOCUMENTS, side=given), times()
    later = np.where((time % CHUNK == 0)[..., None], given, 9.0)
    np.testing.assert_array_equal(whole(config, params, inputs(), DOCUMENTS, side=later), code)
    first = np.where((time % CHUNK == 0)[..., None], 9.0, given)
    moved = np.abs(whole(config, params, inputs(), DOCUMENTS, side=first) - code).max(-1)
    np.testing.assert_array_equal(moved > 1e-3, time >= CHUNK)
    assert DOCUMENTS.shape[1] == LENGTH


def routed(**options):
    return RouterConfig(**options)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Mixed(by="length", at=(5.0,)), "must be 2 rising thresholds for by='length' and 3 levels"),
        (lambda: Mixed(by="length", at=(5.0, 5.0)), r"rising thresholds .* got \(5.0, 5.0\)"),
        (lambda: Mixed(("chunk", "token"), "entropy", (1.0,)), "which are below 1"),
        (
            lambda: routed(level=Mixed(), reads=(ChunkMean(),)),
            r"nothing that level 'prefix' reads: add Prefix\(128\)",
        ),
        (
            lambda: AdapterConfig(rank=1, router=routed(level=Mixed(("chunk", "token"), "entropy", (0.5,)))),
            "needs a code of two numbers or more",
        ),
        (
            lambda: Stack(
                StackConfig(
                    dim=8, num_layers=1, pattern=("recurrence",), adapter=over(reads=(ChunkMean(), Side(3)))
                )
            ).init(jax.random.key(0), jnp.zeros((1, 4, 8))),
            "the router's reads take 3 side features a token, got 0",
        ),
    ],
)
def test_what_is_refused(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
