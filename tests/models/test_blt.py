"""The whole byte-patched model: causal at every byte, documents apart, byte by byte equal to the parallel pass."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.mixers import (
    AttentionConfig,
    HyenaConfig,
    MACConfig,
    MAGConfig,
    ModalFilter,
    NeuralMemoryConfig,
    SlotMemoryConfig,
)
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig, blt, init_blt_state
from jaxblt.models.bridge import visible_patches
from jaxblt.patching import PatcherConfig
from jaxblt.patching.patches import from_closed
from pallas_kernels.runtime import compiling_for, record_choices
from tests.mixer_table import table
from tests.pallas_kernels.linear_state import HOPPER
from tests.parameters import drawn
from tests.tolerances import assert_close, tol

BLOCK, SLOTS = 16, 8
# the shape of all calls of one compiled pass: three blocks and a half
ROWS, LENGTH = 8, 56
PATCHER = PatcherConfig(mode="space", block_size=BLOCK, capacity=SLOTS)


def blt_config(causal=True, latent=("H", "A", "recurrence"), **changes):
    heads = AttentionConfig(dim=16, num_heads=2)
    local = StackConfig(
        dim=16, num_layers=1, pattern="W", mlp_dim=0, mixers=table(attention=heads, window=6), causal=causal
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
    return rng.integers(4, 260, (rows, length)).astype(np.int32), rng.random((rows, length)) < rate


@jax.jit
def group(closed, segments):
    return from_closed(closed, segments, block_size=BLOCK, capacity=SLOTS)


@partial(jax.jit, static_argnums=0)
def apply(module, params, ids, closed, segments):
    return module.apply({"params": params}, ids, patches=group(closed, segments), segment_ids=segments)[0]


@partial(jax.jit, static_argnums=0)
def step(module, params, ids, closed, state, segments):
    return module.apply({"params": params}, ids, state, closed=closed, segment_ids=segments, method="step")


@pytest.fixture(scope="module")
def model():
    """A config, its module, parameters, and the compiled pass: rows are filled up with rows and bytes of padding."""
    config = blt_config()
    module = config.build()
    ids, closed = sample(LENGTH)
    params = drawn(module, ids, patches=group(closed, np.ones_like(ids)))["params"]

    def forward(ids, closed, segments=None):
        segments = np.ones_like(ids) if segments is None else segments
        missing = ((0, -len(ids) % ROWS), (0, LENGTH - ids.shape[1]))
        rows = [np.pad(a, missing).reshape(-1, ROWS, LENGTH) for a in (ids, closed, segments)]
        logits = np.concatenate([apply(module, params, *part) for part in zip(*rows, strict=True)])
        return logits[: len(ids), : ids.shape[1]]

    return config, module, params, forward


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_output_is_as_long_as_the_input(model):
    _, module, params, _ = model
    ids, closed = sample(40)
    assert jax.eval_shape(partial(apply, module), params, ids, closed, np.ones_like(ids)).shape == (
        2,
        40,
        260,
    )


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_the_future_never_reaches_the_past_at_any_byte(model):
    _, _, _, forward = model
    ids, closed = sample(LENGTH, rows=1)
    rng = np.random.default_rng(7)
    others, cuts = ids.repeat(LENGTH, 0), closed.repeat(LENGTH, 0)
    for t in range(LENGTH):
        others[t, t + 1 :] = rng.integers(4, 260, LENGTH - 1 - t)
        cuts[t, t + 1 :] = rng.random(LENGTH - 1 - t) < 0.5
    (base,), moved = forward(ids, closed), forward(others, cuts)
    for t in range(LENGTH):
        np.testing.assert_allclose(moved[t, : t + 1], base[: t + 1], **tol(jnp.float32, 256), err_msg=str(t))
        if t < LENGTH - 1:
            assert np.abs(moved[t, t + 1 :] - base[t + 1 :]).max() > 1e-2


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_every_byte_reaches_the_last_patch(model):
    _, module, params, _ = model
    ids, closed = sample(40, rows=1, rate=0.2)
    patches = group(closed, np.ones_like(ids))
    last = int(jnp.sum(patches.lengths[0, -1] > 0)) - 1
    h = jax.random.normal(jax.random.key(2), (1, 40, 16))
    latent = lambda h: module.apply({"params": params}, h, patches, method="latent_forward")  # noqa: E731
    grads = jax.jit(jax.grad(lambda h: jnp.sum(latent(h)[0, -1, last] ** 2)))(h)
    assert (np.abs(np.asarray(grads)[0]).max(-1) > 0).all()


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_packed_documents_equal_documents_apart(model):
    _, _, _, forward = model
    ids, closed = sample(LENGTH, rows=1)
    segments = np.array([[1] * 27 + [0] * 5 + [2] * 20 + [0] * 4], np.int32)
    together = forward(ids, closed, segments)
    for start, stop in ((0, 27), (32, 52)):
        alone = forward(ids[:, start:stop], closed[:, start:stop])
        np.testing.assert_allclose(together[:, start:stop], alone, **tol(jnp.float32, 256))


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_none_equals_one_document(model):
    """Also if rows have the length of a document, and no padding."""
    _, module, params, forward = model
    ids, closed = sample(40)
    patches = group(closed, np.ones_like(ids))
    plain = jax.jit(lambda p, ids: module.apply({"params": p}, ids, patches=patches)[0])(params, ids)
    np.testing.assert_allclose(forward(ids, closed), np.asarray(plain), **tol(jnp.float32, 256))


NUM_BYTES = 520


def stream(config, module, params, ids, closed, segments):
    """Logits of bytes one by one, and the state after them; caches are of one size, for one program."""
    state = init_blt_state(config, PATCHER, ids.shape[0], num_bytes=NUM_BYTES)
    out = []
    for t in range(ids.shape[1]):
        logits, _, state = step(module, params, ids[:, t], closed[:, t], state, segments[:, t])
        out.append(np.asarray(logits))
    return np.stack(out, 1), state


def kept(closed):
    """Boundaries with those at the ends of blocks, and without those that found no slot."""
    patches = group(closed, np.ones(closed.shape, np.int32))
    return np.asarray(patches.closed).reshape(len(closed), -1)[:, : closed.shape[1]]


def test_byte_by_byte_equals_the_parallel_pass_over_512_bytes(model):
    config, module, params, _ = model
    ids, closed = sample(NUM_BYTES, seed=3, rate=0.25)
    segments = np.ones_like(ids)
    whole = np.asarray(apply(module, params, ids, closed, segments))
    got, _ = stream(config, module, params, ids, kept(closed), segments)
    np.testing.assert_allclose(got, whole, **tol(jnp.float32, 2048))


@pytest.mark.slow(days=28, group="decoding")
def test_features_may_enter_behind_the_encoder(model):
    """The encoder then does not depend on patches, and bytes one by one still equal the parallel pass."""
    config, _, params, forward = model
    config = dataclasses.replace(config, features_enter="output")
    module = config.build(patcher=PATCHER)
    ids = np.random.default_rng(6).choice(np.frombuffer(b"ab c", np.uint8) + 4, (2, 40)).astype(np.int32)
    whole, patches = jax.jit(module.apply)({"params": params}, ids)
    step = jax.jit(partial(module.apply, method="step"))
    state, out = module.init_state(2, num_bytes=40), []
    for t in range(40):
        logits, closed, state = step({"params": params}, ids[:, t], state)
        out.append(jax.device_get((logits, closed)))
    logits, closed = (np.stack(columns, 1) for columns in zip(*out, strict=True))
    np.testing.assert_array_equal(closed, np.asarray(patches.closed).reshape(2, -1)[:, :40])
    np.testing.assert_allclose(logits, np.asarray(whole), **tol(jnp.float32, 1024))
    early = forward(ids, closed)
    assert np.abs(early - np.asarray(whole)).max() > 1e-2


@pytest.mark.slow(days=28, group="decoding")
def test_rows_advance_on_their_own_and_documents_change(model):
    config, module, params, forward = model
    ids, closed = sample(48, seed=4)
    flat, whole = kept(closed), forward(ids, closed)
    # row 0 reads a byte every call, row 1 every other call; then row 0 starts the document of row 1
    calls, at = [], [0, 0]
    for call in range(96):
        live = [at[0] < 48, call % 2 == 1 and at[1] < 48]
        column = [
            (int(ids[b, at[b]]), bool(flat[b, at[b]]), 1) if live[b] else (7, True, 0) for b in range(2)
        ]
        at = [at[b] + live[b] for b in range(2)]
        calls.append(column)
    table = np.array(calls, np.int32).transpose(2, 1, 0)
    got, state = stream(config, module, params, table[0], table[1].astype(bool), table[2])
    for b in range(2):
        np.testing.assert_allclose(got[b][table[2, b] > 0], whole[b], **tol(jnp.float32, 1024))
    for t in range(20):
        second = np.array([2, 2], np.int32)
        logits, _, state = step(module, params, ids[::-1, t], flat[::-1, t], state, second)
        np.testing.assert_allclose(np.asarray(logits), whole[::-1, t], **tol(jnp.float32, 1024))


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_holes_of_a_block_count_as_time(model):
    """A block with few patches leaves slots unused; the latent stack sees them in both forms alike."""
    config, module, params, forward = model
    ids, _ = sample(LENGTH, seed=5)
    closed = np.zeros(ids.shape, bool)
    closed[:, 20] = True
    got, _ = stream(config, module, params, ids, kept(closed), np.ones_like(ids))
    np.testing.assert_allclose(got, forward(ids, closed), **tol(jnp.float32, 1024))


def test_visible_patches_equal_a_loop():
    _, closed = sample(61, seed=6)
    segments = np.array([[1] * 32 + [2] * 29, [1] * 61], np.int32)
    patches = group(closed, segments)
    blocks, capacity = patches.starts.shape[1:]
    marks = np.arange(1, 2 * blocks * capacity + 1, dtype=np.float32).reshape(2, blocks, capacity, 1)
    visible = jax.jit(partial(visible_patches, look_back=3, causal=True))
    keys, latest, valid = jax.device_get(visible(marks, patches))
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


MEMORIES = {
    "K": NeuralMemoryConfig(dim=24, num_heads=2, chunk_size=4),
    "J": MAGConfig(dim=24, num_heads=2, chunk_size=4, window=4),
    "C": MACConfig(dim=24, num_heads=2, chunk_size=4, segment_alignment=SLOTS),
    "B": SlotMemoryConfig(dim=24, num_heads=2, slots=4, interval=4),
}


@pytest.mark.slow(days=28, group="memories and states")
@pytest.mark.parametrize("letter", MEMORIES)
def test_a_memory_may_be_a_letter_of_the_latent_stack(letter):
    """By itself: causal, read far beyond windows and look-back, byte by byte as in one pass, and packed as apart."""
    latent = StackConfig(dim=24, num_layers=1, pattern=letter, mlp_dim=32, mixers=MEMORIES)
    config = dataclasses.replace(blt_config(), latent=latent)
    module = config.build()
    ids, closed = sample(LENGTH, rows=1)
    others, cut = ids.repeat(ROWS, 0), closed.repeat(ROWS, 0)
    params = drawn(module, others, patches=group(cut, np.ones_like(others)))["params"]
    changed = [0, 3, 16, 17, 40, 54, 55]
    for row, t in enumerate(changed, 1):
        others[row, t] = 4 + (others[row, t] - 3) % 256
    whole = np.asarray(apply(module, params, others, cut, np.ones_like(others)))
    moved = np.abs(whole - whole[:1]).max(-1)
    for row, t in enumerate(changed, 1):
        np.testing.assert_allclose(whole[row, :t], whole[0, :t], **tol(jnp.float32, 256))
        assert moved[row, t] > 1e-2
    assert moved[1, -1] > (5e-5 if letter == "J" else 1e-4)  # half of MAG is a window
    got, _ = stream(config, module, params, others, kept(cut), np.ones_like(others))
    np.testing.assert_allclose(got, whole, **tol(jnp.float32, 2048))
    segments = np.zeros_like(others)
    segments[0] = [1] * 27 + [0] * 5 + [2] * 20 + [0] * 4
    places = {1: slice(27), 2: slice(32, 52)}
    for row, place in places.items():  # the same document at a row's start
        size = place.stop - (place.start or 0)
        others[row, :size], cut[row, :size], segments[row, :size] = others[0, place], cut[0, place], row
    found = np.asarray(apply(module, params, others, cut, segments))
    for row, place in places.items():
        alone = found[row, : place.stop - (place.start or 0)]
        np.testing.assert_allclose(found[0, place], alone, **tol(jnp.float32, 256))


@pytest.mark.slow(days=28, group="decoding")
def test_a_bidirectional_model_sees_both_ways():
    config = blt_config(causal=False, latent="A")
    module = config.build()
    ids, closed = sample(32)
    ones = np.ones_like(ids)
    params = drawn(module, ids, patches=group(closed, ones))["params"]
    other = ids.copy()
    other[:, 16] = 5
    y, z = (np.asarray(apply(module, params, i, closed, ones)) for i in (ids, other))
    change = np.abs(y - z).max((0, 2))
    assert change[:16].max() > 1e-4
    assert change[17:].max() > 1e-4


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_gradients_reach_every_parameter(model):
    _, module, params, _ = model
    ids, closed = sample(48)

    @jax.jit
    @jax.grad
    def grads(params):
        log_p = jax.nn.log_softmax(apply(module, params, ids, closed, np.ones_like(ids)))[:, :-1]
        return -jnp.mean(jnp.take_along_axis(log_p, jnp.asarray(ids)[:, 1:, None], 2))

    flat = jax.tree_util.tree_leaves_with_path(jax.device_get(grads(params)))
    dead = [jax.tree_util.keystr(path) for path, g in flat if not np.abs(g).max()]
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
        module.init(jax.random.key(0), ids[:, :32], patches=group(closed, np.ones_like(ids)))
    with pytest.raises(ValueError, match="needs the patcher that it was trained with, or patches"):
        module.init(jax.random.key(0), ids)
    with pytest.raises(ValueError, match="a ByteLM has no patches"):
        ByteLMConfig().build(patcher=PATCHER)


@pytest.mark.slow(days=28, group="costly", turn="models/test_blt")
def test_as_it_comes_packed_patches_are_convolved_by_the_kernel(monkeypatch):
    """On a Hopper GPU, though its mixers are not promised one document a row."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    module = BLTConfig().build(dtype=jnp.bfloat16, patcher=PatcherConfig(mode="static", patch_size=4))
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    with compiling_for(HOPPER), record_choices() as lines:
        jax.eval_shape(lambda ids: module.init(jax.random.key(0), ids, segment_ids=ids), ids)
    chosen = [line.split(" on ")[0] for line in lines if line.startswith("modal_conv")]
    assert chosen == ["modal_conv: mosaic_gpu"], lines


LOCAL = StackConfig(dim=16, num_layers=1, pattern=("recurrence",), mlp_dim=0)
MIXERS = table(
    hyena=HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=64.0)),
    attention=AttentionConfig(dim=16, num_heads=2),
)
LATENT = StackConfig(dim=16, num_layers=2, pattern="HA", mlp_dim=0, mixers=MIXERS)


@pytest.mark.slow(days=28, group="costly")
def test_unused_slots_are_skipped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of four patches leaves 8 of its 12 slots unused: three pieces of 3, or one."""
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16, capacity=12)
    model = BLTConfig(LOCAL, LATENT, LOCAL, hash=None, bridge_heads=2).build(patcher=patcher)
    ids = np.random.default_rng(0).integers(4, 260, (2, 18)).astype(np.int32)
    params = drawn(model, ids[:, :16])
    rows = np.array([[1, 1], [1, 0]], np.int32)

    def after(size: int) -> Any:
        monkeypatch.setattr(blt, "HOLES", size)
        step = jax.jit(partial(model.apply, params, method="step"))
        state, logits = model.init_state(2, num_bytes=32), None
        for t in range(18):
            column, given = (jnp.asarray(x) for x in (ids[:, t], rows[:, int(t >= 8)]))
            logits, _, state = step(column, state, segment_ids=given)
        return logits, state

    for found, known in zip(jax.tree.leaves(after(3)), jax.tree.leaves(after(64)), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)
