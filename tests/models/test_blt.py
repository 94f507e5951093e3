"""The whole byte-patched model: causal at every byte, documents apart, byte by byte equal to the parallel pass."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig, init_blt_state
from jaxblt.models.bridge import visible_patches
from jaxblt.patching import PatcherConfig
from jaxblt.patching.patches import from_closed
from tests.mixer_table import table
from tests.tolerances import tol

BLOCK, SLOTS = 16, 8
PATCHER = PatcherConfig(mode="space", block_size=BLOCK, capacity=SLOTS)


def blt_config(causal=True, latent="HAR", **changes):
    heads = AttentionConfig(dim=16, num_heads=2)
    local = StackConfig(
        dim=16, num_layers=1, pattern="W", mlp_dim=24, mixers=table(attention=heads, window=6), causal=causal
    )
    stack = StackConfig(
        dim=24, num_layers=3, pattern=latent, mlp_dim=32, mixers=table(attention=heads), causal=causal
    )
    small = HashConfig(sizes=(3, 4), table_size=64)
    fields = {
        "encoder": local,
        "latent": stack,
        "decoder": local,
        "hash": small,
        "bridge_heads": 2,
        "look_back": 3,
    }
    return BLTConfig(**(fields | changes))


def sample(length, seed=0, rows=2, rate=0.3):
    rng = np.random.default_rng(seed)
    ids = jnp.asarray(rng.integers(4, 260, (rows, length)), jnp.int32)
    return ids, jnp.asarray(rng.random((rows, length)) < rate)


def group(closed, segments):
    return from_closed(closed, segments, block_size=BLOCK, capacity=SLOTS)


@pytest.fixture(scope="module")
def model():
    config = blt_config()
    ids, closed = sample(40)
    module = config.build()
    patches = group(closed, jnp.ones_like(ids))
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), ids, patches=patches))["params"]
    # larger than at the start, so that every part moves the logits by more than rounding
    params = jax.tree.map(lambda p: p * 1.5 if p.ndim > 1 else p, params)
    forward = jax.jit(
        lambda ids, patches, segments: module.apply(
            {"params": params}, ids, patches=patches, segment_ids=segments
        )[0]
    )
    return config, module, params, forward


def test_output_is_as_long_as_the_input(model):
    _, _, _, forward = model
    ids, closed = sample(40)
    segments = jnp.ones_like(ids)
    assert forward(ids, group(closed, segments), segments).shape == (2, 40, 260)


def test_the_future_never_reaches_the_past_at_any_byte(model):
    _, _, _, forward = model
    ids, closed = sample(40, rows=1)
    rng = np.random.default_rng(7)
    others, cuts = np.asarray(ids).repeat(40, 0), np.asarray(closed).repeat(40, 0)
    for t in range(40):
        others[t, t + 1 :] = rng.integers(4, 260, 39 - t)
        cuts[t, t + 1 :] = rng.random(39 - t) < 0.5
    ones = jnp.ones((40, 40), jnp.int32)
    base = np.asarray(forward(ids.repeat(40, 0), group(closed.repeat(40, 0), ones), ones))
    moved = np.asarray(forward(jnp.asarray(others), group(jnp.asarray(cuts), ones), ones))
    for t in range(40):
        np.testing.assert_allclose(
            moved[t, : t + 1], base[t, : t + 1], **tol(jnp.float32, 256), err_msg=str(t)
        )
        if t < 39:
            assert np.abs(moved[t, t + 1 :] - base[t, t + 1 :]).max() > 1e-2


def test_every_byte_reaches_the_last_patch(model):
    _, module, params, _ = model
    ids, closed = sample(40, rows=1, rate=0.2)
    patches = group(closed, jnp.ones_like(ids))
    last = int(jnp.sum(patches.lengths[0, -1] > 0)) - 1
    h = jax.random.normal(jax.random.key(2), (1, 40, 16))
    latent = lambda h: module.apply({"params": params}, h, patches, method="latent_forward")  # noqa: E731
    grads = jax.jit(jax.grad(lambda h: jnp.sum(latent(h)[0, -1, last] ** 2)))(h)
    assert (np.abs(np.asarray(grads)[0]).max(-1) > 0).all()


def test_packed_documents_equal_documents_apart(model):
    _, _, _, forward = model
    ids, closed = sample(64, rows=1)
    segments = jnp.asarray([[1] * 27 + [0] * 5 + [2] * 20 + [0] * 12], jnp.int32)
    together = np.asarray(forward(ids, group(closed, segments), segments))
    for start, stop in ((0, 27), (32, 52)):
        part, cut = ids[:, start:stop], closed[:, start:stop]
        ones = jnp.ones_like(part)
        alone = np.asarray(forward(part, group(cut, ones), ones))
        np.testing.assert_allclose(together[:, start:stop], alone, **tol(jnp.float32, 256))


def test_none_equals_one_document(model):
    _, module, params, forward = model
    ids, closed = sample(48)
    ones = jnp.ones_like(ids)
    patches = group(closed, ones)
    plain = jax.jit(lambda: module.apply({"params": params}, ids, patches=patches)[0])()
    np.testing.assert_allclose(
        np.asarray(forward(ids, patches, ones)), np.asarray(plain), **tol(jnp.float32, 256)
    )


def stream(config, module, params, ids, closed, segments, num_bytes):
    step = jax.jit(
        lambda i, c, state, s: module.apply(
            {"params": params}, i, state, closed=c, segment_ids=s, method="step"
        )
    )
    state = init_blt_state(config, PATCHER, ids.shape[0], num_bytes=num_bytes)
    out = []
    for t in range(ids.shape[1]):
        logits, _, state = step(ids[:, t], closed[:, t], state, segments[:, t])
        out.append(logits)
    return np.asarray(jnp.stack(out, 1)), state


def test_byte_by_byte_equals_the_parallel_pass_over_512_bytes(model):
    config, module, params, forward = model
    ids, closed = sample(520, seed=3, rate=0.25)
    segments = jnp.ones_like(ids)
    patches = group(closed, segments)
    whole = np.asarray(forward(ids, patches, segments))
    flat = patches.closed.reshape(2, -1)[:, :520]
    got, _ = stream(config, module, params, ids, flat, segments, 520)
    np.testing.assert_allclose(got, whole, **tol(jnp.float32, 2048))


def test_features_may_enter_behind_the_encoder(model):
    """The encoder then does not depend on patches, and bytes one by one still equal the parallel pass."""
    config, _, params, _ = model
    config = dataclasses.replace(config, features_enter="output")
    module = config.build(patcher=PATCHER)
    ids = jnp.asarray(
        np.random.default_rng(6).choice(np.frombuffer(b"ab c", np.uint8) + 4, (2, 40)), jnp.int32
    )
    whole, patches = jax.jit(module.apply)({"params": params}, ids)
    step = jax.jit(partial(module.apply, method="step"))
    state, out = module.init_state(2, num_bytes=40), []
    for t in range(40):
        logits, closed, state = step({"params": params}, ids[:, t], state)
        out.append((logits, closed))
    logits, closed = (jnp.stack(columns, 1) for columns in zip(*out, strict=True))
    np.testing.assert_array_equal(closed, patches.closed.reshape(2, -1)[:, :40])
    np.testing.assert_allclose(np.asarray(logits), np.asarray(whole), **tol(jnp.float32, 1024))
    early, _ = jax.jit(module.clone(config=model[0]).apply)({"params": params}, ids)
    assert np.abs(np.asarray(early - whole)).max() > 1e-2


def test_rows_advance_on_their_own_and_documents_change(model):
    config, module, params, forward = model
    ids, closed = sample(48, seed=4)
    segments = jnp.ones_like(ids)
    flat = group(closed, segments).closed.reshape(2, -1)[:, :48]
    whole = np.asarray(forward(ids, group(closed, segments), segments))
    # row 0 reads a byte every call, row 1 every other call; then row 0 starts the document of row 1
    calls, at = [], [0, 0]
    for call in range(96):
        live = [at[0] < 48, call % 2 == 1 and at[1] < 48]
        column = [
            (int(ids[b, at[b]]), bool(flat[b, at[b]]), 1) if live[b] else (7, True, 0) for b in range(2)
        ]
        at = [at[b] + live[b] for b in range(2)]
        calls.append(column)
    table = np.array(calls, np.int32)
    got, state = stream(
        config,
        module,
        params,
        jnp.asarray(table[:, :, 0].T),
        jnp.asarray(table[:, :, 1].T, bool),
        jnp.asarray(table[:, :, 2].T),
        96,
    )
    for b in range(2):
        np.testing.assert_allclose(got[b][table[:, b, 2] > 0], whole[b], **tol(jnp.float32, 1024))
    step = jax.jit(
        lambda i, c, state, s: module.apply(
            {"params": params}, i, state, closed=c, segment_ids=s, method="step"
        )
    )
    for t in range(20):
        logits, _, state = step(ids[::-1, t], flat[::-1, t], state, jnp.asarray([2, 2], jnp.int32))
        np.testing.assert_allclose(np.asarray(logits), whole[::-1, t], **tol(jnp.float32, 1024))


def test_holes_of_a_block_count_as_time(model):
    """A block with few patches leaves slots unused; the latent stack sees them in both forms alike."""
    config, module, params, forward = model
    ids, _ = sample(64, seed=5)
    closed = jnp.zeros((2, 64), bool).at[:, 20].set(True)
    segments = jnp.ones_like(ids)
    patches = group(closed, segments)
    flat = patches.closed.reshape(2, -1)[:, :64]
    got, _ = stream(config, module, params, ids, flat, segments, 64)
    np.testing.assert_allclose(got, np.asarray(forward(ids, patches, segments)), **tol(jnp.float32, 1024))


def test_visible_patches_equal_a_loop():
    _, closed = sample(61, seed=6)
    segments = jnp.asarray([[1] * 32 + [2] * 29, [1] * 61], jnp.int32)
    patches = group(closed, segments)
    blocks, capacity = patches.starts.shape[1:]
    marks = jnp.arange(1, 2 * blocks * capacity + 1, dtype=jnp.float32).reshape(2, blocks, capacity, 1)
    keys, latest, valid = (np.asarray(x) for x in visible_patches(marks, patches, look_back=3, causal=True))
    lengths, starts = np.asarray(patches.lengths), np.asarray(patches.starts)
    slots = np.asarray(patches.segment_ids)
    done = np.asarray(patches.closed)
    for b in range(2):
        for t in range(61):
            want = []
            for n in range(blocks):
                for p in range(capacity):
                    end = n * BLOCK + starts[b, n, p] + lengths[b, n, p] - 1
                    ended = end <= t and done[b, n, end % BLOCK] if lengths[b, n, p] else False
                    if ended and slots[b, n, p] == int(segments[b, t]):
                        want.append(float(marks[b, n, p, 0]))
            index = latest[b, t // BLOCK, t % BLOCK]
            seen = [i for i in range(index - 2, index + 1) if i >= 0 and valid[b, t // BLOCK, i]]
            got = [float(keys[b, t // BLOCK, i, 0]) for i in seen]
            assert got == want[-3:], (b, t)


def test_a_bidirectional_model_sees_both_ways():
    config = blt_config(causal=False, latent="A")
    ids, closed = sample(32)
    ones = jnp.ones_like(ids)
    module = config.build()
    patches = group(closed, ones)
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), ids, patches=patches))["params"]
    forward = jax.jit(lambda i: module.apply({"params": params}, i, patches=patches, segment_ids=ones)[0])
    change = np.abs(np.asarray(forward(ids)) - np.asarray(forward(ids.at[:, 16].set(5)))).max((0, 2))
    assert change[:16].max() > 1e-4
    assert change[17:].max() > 1e-4


def test_gradients_reach_every_parameter(model):
    _, module, params, _ = model
    ids, closed = sample(48)
    ones = jnp.ones_like(ids)
    patches = group(closed, ones)

    @jax.jit
    @jax.grad
    def grads(params):
        logits, _ = module.apply({"params": params}, ids, patches=patches, segment_ids=ones)
        return -jnp.mean(
            jax.nn.log_softmax(logits)[:, :-1][jnp.arange(2)[:, None], jnp.arange(47)[None], ids[:, 1:]]
        )

    flat = jax.tree_util.tree_leaves_with_path(grads(params))
    dead = [jax.tree_util.keystr(path) for path, g in flat if float(jnp.abs(g).max()) == 0]
    assert dead == []


def test_errors():
    with pytest.raises(ValueError, match="look_back"):
        blt_config(look_back=1)
    with pytest.raises(ValueError, match="causal together"):
        blt_config(encoder=dataclasses.replace(blt_config().encoder, causal=False))
    with pytest.raises(ValueError, match="does not divide among bridge_heads = 3"):
        blt_config(bridge_heads=3)
    ids, closed = sample(40)
    module = blt_config().build()
    with pytest.raises(ValueError, match="do not fit"):
        module.init(jax.random.key(0), ids[:, :32], patches=group(closed, jnp.ones_like(ids)))
    with pytest.raises(ValueError, match="needs the patcher that it was trained with, or patches"):
        module.init(jax.random.key(0), ids)
    with pytest.raises(ValueError, match="a ByteLM has no patches"):
        ByteLMConfig().build(patcher=PATCHER)
