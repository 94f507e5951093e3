"""A prompt in one pass leaves the state that its bytes would have left one by one."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import encode
from jaxblt.inference import Decoder, SamplingConfig, decode_step, generate, init_decoder, prefill, sample
from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.mixers.attention.kv_cache import AttentionState
from jaxblt.mixers.driver.sequence import splits_call
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import (
    PatcherConfig,
    PatchOverflowWarning,
    init_patcher,
    make_patches,
    prefill_patcher,
    stream_patcher,
)
from tests.mixer_table import table
from tests.pallas_kernels.linear_state import equations
from tests.parameters import drawn
from tests.tolerances import assert_close

HEADS = AttentionConfig(dim=16, num_heads=2)
GREEDY = SamplingConfig(temperature=0)
LOCAL = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=24, mixers=table(attention=HEADS, window=8))
GRAMS = HashConfig(sizes=(3,), table_size=64)
ENTROPY = ByteLMConfig(stack=LOCAL, hash=GRAMS)
BLOCK, TOTAL, STEPS = 16, 71, 12
PATCHERS = {
    "entropy": PatcherConfig(
        mode="entropy", threshold=5.2, block_size=BLOCK, capacity=10, entropy_context=24
    ),
    "greedy": PatcherConfig(mode="greedy", threshold=14.0, block_size=BLOCK),
    "space": PatcherConfig(mode="space", max_length=6, block_size=BLOCK, capacity=4),
    "static": PatcherConfig(mode="static", patch_size=5, block_size=BLOCK),
    "byte": PatcherConfig(mode="byte", block_size=BLOCK, capacity=12),
}


CASES = [("entropy", "HA"), ("space", ("recurrence", "A")), ("static", "H")]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a prompt is several calls, the last one shorter, also than a block."""
    monkeypatch.setattr("jaxblt.inference.prompts.CHUNK", 2 * BLOCK)
    monkeypatch.setattr("jaxblt.models.blt_prefill.TILE", BLOCK // 4)


def unboxed(config, *inputs, **options):
    return drawn(config.build(), *inputs, **options)["params"]


@cache
def decoding(mode, pattern):
    """A decoder and its parameters."""
    hyena = HyenaConfig(dim=24, filter=ModalFilter(modes=4, max_timescale=64.0))
    latent = StackConfig(
        dim=24,
        num_layers=len(pattern),
        pattern=pattern,
        mlp_dim=24,
        mixers=table(attention=HEADS, hyena=hyena),
    )
    model = BLTConfig(LOCAL, latent, LOCAL, hash=GRAMS, bridge_heads=2, look_back=3)
    ids = jnp.ones((1, BLOCK), jnp.int32)
    patches = jax.eval_shape(partial(make_patches, PATCHERS[mode]), ids, entropies=jnp.zeros(ids.shape))
    return Decoder(model, PATCHERS[mode], ENTROPY), {
        "model": unboxed(model, ids, patches=patches),
        "entropy": unboxed(ENTROPY, ids),
    }


@partial(jax.jit, static_argnums=0)
def feed(decoder, params, state, ids, segments):
    """Byte by byte: logits and boundaries at each, and the state after the last."""

    def body(state, column):
        logits, closed, state = decode_step(decoder, params, column[0], state, column[1])
        return state, (logits, closed)

    state, (logits, closed) = jax.lax.scan(body, state, (ids.T, segments.T))
    return jnp.moveaxis(logits, 0, 1), closed.T, state


def compare(actual, expected):
    """Integers equal, other numbers within tolerance; of keys and values only those that there are."""

    def cached(node):
        if not isinstance(node, AttentionState):
            return node
        held = (node.times >= 0)[..., None, None].astype(node.k.dtype)
        return node.replace(k=node.k * held, v=node.v * held)

    @jax.jit
    def mask(state):
        state = jax.tree.map(cached, state, is_leaf=lambda node: isinstance(node, AttentionState))
        model = state.model
        if not hasattr(model, "offset"):
            return state
        held = (jnp.arange(BLOCK)[None] < model.offset[:, None])[..., None].astype(model.keys.dtype)
        return state.replace(model=model.replace(keys=model.keys * held, values=model.values * held))

    pairs = zip(
        jax.tree_util.tree_leaves_with_path(mask(actual)), jax.tree.leaves(mask(expected)), strict=True
    )
    for (path, a), b in pairs:
        if jnp.issubdtype(a.dtype, jnp.floating):
            assert_close(a, b, n=1024, what=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def every_length():
    """Prompts of 1, 2, 3, ... bytes, a row each."""
    lengths = np.arange(1, TOTAL + 1)
    return lengths, jnp.asarray(np.arange(TOTAL)[None] < lengths[:, None], jnp.int32)


def check_every_length(decoder, params, seed):
    """The state after prompts of every length, and a few bytes more from there."""
    rng = np.random.default_rng(seed)
    ids = jnp.asarray(np.tile(rng.integers(4, 260, 2 * TOTAL), (TOTAL, 1)), jnp.int32)
    lengths, segments = every_length()
    start = init_decoder(decoder, TOTAL, num_bytes=TOTAL + STEPS)
    every, closed, expected = feed(decoder, params, start, ids[:, :TOTAL], segments)
    fill = jax.jit(partial(prefill, decoder, num_bytes=TOTAL + STEPS))
    logits, state = fill(params, ids[:, :TOTAL], segments)
    compare(state, expected)
    every = np.asarray(every)[np.arange(TOTAL), lengths - 1]
    assert_close(logits, every, n=1024)
    after = jnp.take_along_axis(ids, jnp.asarray(lengths[:, None] + np.arange(TOTAL)[None]), 1)
    few = jnp.broadcast_to((jnp.arange(TOTAL) < STEPS).astype(jnp.int32), after.shape)
    got, want = (feed(decoder, params, s, after, few) for s in (state, expected))
    assert_close(got[0][:, :STEPS], want[0][:, :STEPS], n=1024)
    np.testing.assert_array_equal(np.asarray(got[1]), np.asarray(want[1]))
    return np.asarray(closed)[-1]


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize(("mode", "pattern"), CASES)
def test_a_prompt_of_any_length_leaves_the_state_of_its_bytes(mode, pattern):
    closed = check_every_length(*decoding(mode, pattern), seed=1)
    blocks = closed[: TOTAL // BLOCK * BLOCK].reshape(-1, BLOCK)
    assert blocks[:, :-1].any()
    assert not blocks[:, :-1].all()
    assert blocks[:, -1].all()


def test_a_short_call_multiplies_no_whole_block():
    """The bridges between bytes and patches read its own bytes, and a few that fill up a tile."""
    decoder, params = decoding("static", "H")
    decoder = replace(decoder, patcher=replace(decoder.patcher, block_size=1024))

    def read(params, ids):
        return prefill(decoder, params, ids, jnp.ones_like(ids), num_bytes=1024)

    found = jax.make_jaxpr(read)(params, jnp.ones((2, 24), jnp.int32))
    products = [e for e in equations(found.jaxpr) if e.primitive.name == "dot_general"]
    assert products
    assert max(max(e.outvars[0].aval.shape) for e in products) < 1024


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_model_s_prompt_of_any_length_leaves_the_state_of_its_bytes():
    config = ByteLMConfig(stack=LOCAL, hash=GRAMS)
    check_every_length(Decoder(config), {"model": unboxed(config, jnp.ones((1, 8), jnp.int32))}, seed=2)


@pytest.mark.slow(days=21, every="entropy")
@pytest.mark.parametrize("mode", PATCHERS)
def test_the_patcher_s_state_after_a_prompt_of_any_length(mode):
    rng = np.random.default_rng(4)
    _, segments = every_length()
    ids = jnp.asarray(rng.integers(4, 260, segments.shape), jnp.int32)
    entropies = jnp.asarray(rng.uniform(3, 6, segments.shape), jnp.float32)
    config = PATCHERS[mode]
    scan = jax.jit(lambda: stream_patcher(config, init_patcher(config, TOTAL), ids, entropies, segments))
    expected, closed = scan()
    start = init_patcher(config, TOTAL)
    state, found = jax.jit(lambda: prefill_patcher(config, start, ids, entropies, segments))()
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(closed))


@pytest.mark.slow(days=28, group="decoding")
def test_generated_bytes_are_the_best_after_all_bytes_fed_one_by_one():
    decoder, params = decoding("entropy", "HA")
    text = bytes(np.random.default_rng(3).integers(0, 256, TOTAL - STEPS - 1).tolist())
    prompts = [b"", text[:15], text[:31], text[:40], text]
    with pytest.warns(PatchOverflowWarning) as warned:
        found = generate(decoder, params, prompts, max_new_bytes=STEPS, sampling=GREEDY)
    rows = [encode(prompt, bos=True) for prompt in prompts]
    # the shape of prompts of every length, whose program feeds these too
    table, fed = np.zeros((2, TOTAL, TOTAL), np.int32)
    for i, (row, new) in enumerate(zip(rows, found, strict=True)):
        assert len(new) == STEPS
        table[i, : len(row) + STEPS] = [*row, *(byte + 4 for byte in new)]
        fed[i, : len(row) + STEPS - 1] = 1
    state = init_decoder(decoder, TOTAL, num_bytes=TOTAL + STEPS)
    logits, _, state = feed(decoder, params, state, jnp.asarray(table), jnp.asarray(fed))
    refused, wanted = (int(count.sum()) for count in decoder.build().boundaries(state.model))
    assert f"{refused} of {wanted} patch boundaries ({refused / wanted:.1%})" in str(warned[0].message)
    for line, row, new in zip(np.asarray(logits), rows, found, strict=False):
        best = sample(
            GREEDY,
            jax.random.split(jax.random.key(0), STEPS),
            jnp.asarray(line[len(row) - 1 : len(row) - 1 + STEPS]),
        )
        assert new == bytes((np.asarray(best) - 4).tolist())


@pytest.mark.slow(days=28, group="decoding")
def test_a_prompt_split_over_the_sequence_leaves_the_state_of_one_device():
    decoder, params = decoding("entropy", "HA")
    ids = jnp.asarray(np.random.default_rng(5).integers(4, 260, (2, 520)), jnp.int32)
    segments = jnp.asarray(np.arange(520)[None] < np.array([[520], [300]]), jnp.int32)
    fill = partial(prefill, decoder, num_bytes=600)
    logits, state = jax.jit(fill)(params, ids, segments)
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        assert splits_call(512 // BLOCK * PATCHERS["entropy"].slots)
        found, split = jax.jit(fill)(params, ids, segments)
    assert_close(found, logits, n=1024)
    compare(split, state)
