import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from jaxblt.data import load_sample, vocab
from jaxblt.models import init_byte_lm_state
from jaxblt.patching import (
    PatcherConfig,
    byte_entropies,
    init_patcher,
    step_patcher,
    stream_entropies,
    stream_patcher,
)
from tests.patching.cases import EVERY, SIZE, config_of, patch
from tests.patching.rows import random_rows
from tests.tolerances import tol

step = jax.jit(step_patcher, static_argnums=0)


@pytest.fixture(scope="module")
def sample():
    return random_rows(11, rows=4, blocks=4, block_size=SIZE)


@functools.partial(jax.jit, static_argnums=0)
def scan(config, ids, entropies, segments):
    return stream_patcher(config, init_patcher(config, ids.shape[0]), ids, entropies, segments)


@pytest.mark.parametrize(("rule", "limit"), EVERY)
def test_byte_by_byte_gives_the_boundaries_of_the_parallel_pass(sample, rule, limit):
    ids, _, segments = sample
    config = config_of(rule, limit)
    # Not on a grid: the fixed-point sums are what makes greedy agree.
    entropies = jax.random.uniform(jax.random.key(4), ids.shape, jnp.float32, 0.0, 5.5)
    state, closed = scan(config, ids, entropies, segments)
    patches = patch(config, ids, segment_ids=segments, entropies=entropies)
    np.testing.assert_array_equal(closed, np.asarray(patches.closed).reshape(ids.shape))
    # The state counts over the last document of each row.
    last = np.max(segments, 1)
    of_last = np.asarray(patches.segment_ids[..., 0]) == last[:, None]
    np.testing.assert_array_equal(state.overflow, np.sum(np.where(of_last, patches.overflow, 0), 1))
    inside = np.sum(np.asarray(patches.closed)[..., :-1], 2)
    np.testing.assert_array_equal(state.wanted - state.overflow, np.sum(np.where(of_last, inside, 0), 1))
    if limit == "slots" and rule != "space":
        assert int(patches.overflow.sum()) > 0


def test_rows_without_a_byte_keep_their_state_and_rows_advance_on_their_own(sample):
    ids, entropies, segments = sample
    config = PatcherConfig(mode="greedy", threshold=9.0, min_length=2, capacity=6, block_size=SIZE)
    _, expected = scan(config, ids, entropies, segments)
    expected = np.asarray(expected)
    rng = np.random.default_rng(0)
    rows, at = np.arange(4), np.zeros(4, int)
    state = init_patcher(config, 4)
    found = np.zeros_like(expected)
    while (at < ids.shape[1]).any():
        go = (rng.random(4) < 0.6) & (at < ids.shape[1])
        here = np.minimum(at, ids.shape[1] - 1)
        segment = jnp.where(go, segments[rows, here], 0)
        # What a row without a byte is fed must not matter.
        after, closed = step(
            config, state, ids[rows, here], jnp.where(go, entropies[rows, here], jnp.nan), segment
        )
        idle = np.asarray(segment) == 0
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert np.asarray(old)[idle].tobytes() == np.asarray(new)[idle].tobytes()
        assert not np.asarray(closed)[idle].any()
        found[rows[go], at[go]] = np.asarray(closed)[go]
        at, state = at + go, after
    np.testing.assert_array_equal(found, expected)


def test_the_state_tells_slot_and_block_edge():
    config = PatcherConfig(mode="static", patch_size=2, block_size=6, capacity=2)
    state = init_patcher(config, 1)
    used, offsets = [], []
    for t in range(8):
        state, _ = step(config, state, jnp.full(1, 70 + t), jnp.zeros(1), jnp.ones(1, jnp.int32))
        used.append(int(state.used[0]))
        offsets.append(int(state.offset[0]))
    assert offsets == [1, 2, 3, 4, 5, 6, 1, 2]
    assert used == [1, 2, 2, 3, 3, 3, 1, 2]
    assert int(state.overflow[0]) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "optimal", "threshold": 1.0}, "cannot run byte by byte"),
        ({"mode": "length_constrained", "threshold": 1.0, "num_patches": 512}, "cannot run byte by byte"),
        ({"mode": "greedy"}, "calibrate_threshold"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        init_patcher(PatcherConfig(**options), 1)


CHUNK = 256


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(2**11, marks=pytest.mark.slow(days=28, group="costly")),
        pytest.param(2**20, marks=pytest.mark.slow(days=28, group="long")),
    ],
)
def test_chunks_equal_one_pass(length):
    config = configs.get("demo_entropy").model
    model = config.build()
    text = (load_sample("book") * (length // len(load_sample("book")) + 1))[: length - 1]
    ids = jnp.asarray(vocab.encode(text, bos=True))[None]
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), ids[:, :256]))
    # a larger table, which is the head as well: entropies differ from byte to byte
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: 25 * p if "embedding" in jax.tree_util.keystr(path) else p, params
    )

    def stream(params, ids, state, *, segment_ids):
        return model.apply(params, ids, state, segment_ids=segment_ids, method="stream")

    once = np.asarray(jax.jit(partial(byte_entropies, model.apply))(params, ids))[0]
    state = init_byte_lm_state(config, 1, capacity=length)
    found = np.asarray(jax.jit(partial(stream_entropies, stream, chunk=CHUNK))(params, ids, state))[0]
    assert found.shape == (length,)
    assert once.std() > 0.1
    np.testing.assert_allclose(found, once, **tol(jnp.float32, n=config.vocab_size))
    alone = np.asarray(jax.jit(partial(byte_entropies, model.apply))(params, ids[:, -CHUNK:]))[0]
    assert np.abs(alone[:32] - once[-CHUNK:][:32]).max() > 0.01, "what went before should matter to a chunk"
