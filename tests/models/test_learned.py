"""Learned boundaries in the whole model: causal, documents apart, byte by byte, and trained through every gate."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig
from jaxblt.models import BLTConfig, HashConfig, StackConfig
from jaxblt.models.unmerge import LatestPatch, keep_bytes, smooth
from jaxblt.patching import PatcherConfig, decided
from jaxblt.patching.learned import BoundaryConfig, calibrate_router
from jaxblt.patching.patches import from_closed
from tests.mixer_table import table
from tests.pallas_kernels.linear_state import equations
from tests.parameters import drawn
from tests.tolerances import tol

ROWS, LENGTH, BLOCK, TARGET = 8, 56, 16, 3.0
PATCHER = PatcherConfig(
    mode="learned", block_size=BLOCK, capacity=12, max_length=6, target=TARGET, reads_entropies=True
)
HYBRID = BoundaryConfig(
    strategy="adaptive_hybrid",
    parts=("content_similarity", "entropy_based", "pattern_aware"),
    motifs=("TAT", "GNC"),
    learned_motifs=2,
    motif_length=4,
    codon_phase=True,
)


def config_of(router: BoundaryConfig = HYBRID) -> BLTConfig:
    local = StackConfig(
        dim=16,
        num_layers=1,
        pattern="W",
        mlp_dim=0,
        mixers=table(attention=AttentionConfig(dim=16, num_heads=2), window=6),
    )
    latent = StackConfig(
        dim=24,
        num_layers=2,
        pattern=("R",),
        mlp_dim=0,
        mixers={"R": GatedRecurrenceConfig(dim=24)},
        remat="full",
    )
    small = HashConfig(sizes=(3,), table_size=64)
    sizes = {"hash": small, "bridge_heads": 2, "look_back": 3}
    return BLTConfig(
        encoder=local, latent=latent, decoder=local, features_enter="output", router=router, **sizes
    )


def sample(rows: int = ROWS, length: int = LENGTH, seed: int = 0):
    """Ids and entropies."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.frombuffer(b"ACGT", np.uint8), (rows, length)).astype(np.int32) + 4
    return ids, rng.random((rows, length)).astype(np.float32)


@pytest.fixture(scope="module")
def model():
    """The module, calibrated parameters, and the compiled pass: logits, patches, p and scores."""
    module = config_of().build(patcher=PATCHER)
    ids, entropies = sample()
    params = drawn(module, ids, entropies=entropies)["params"]
    params["router"]["gate"]["kernel"] = 0 * params["router"]["gate"]["kernel"]

    @jax.jit
    def forward(params, ids, entropies, segments):
        given = {"segment_ids": segments, "entropies": entropies}
        logits, patches = module.apply({"params": params}, ids, **given)
        return logits, patches, *module.apply({"params": params}, ids, **given, method="route")

    ones = np.ones_like(ids)
    *_, scores = forward(params, ids, entropies, ones)
    here = np.arange(LENGTH)[None] + ones > 1
    router = calibrate_router(HYBRID, params["router"], np.asarray(scores), here=here, target=TARGET)
    params = {**params, "router": router}
    return module, params, partial(forward, params)


def flat(patches) -> np.ndarray:
    return np.asarray(patches.closed).reshape(ROWS, -1)[:, :LENGTH]


def test_patches_keep_to_their_limits_and_to_the_target(model) -> None:
    _, _, forward = model
    ids, entropies = sample()
    _, patches, p, _ = forward(ids, entropies, np.ones_like(ids))
    wanted = np.asarray(p) > 0.5
    assert wanted[:, 1:].mean() == pytest.approx(1 / TARGET, rel=0.05)
    np.testing.assert_array_equal(np.asarray(p)[:, 0], 1)
    lengths = np.asarray(patches.lengths)
    assert lengths.max() <= PATCHER.max_length
    assert not np.asarray(patches.overflow).any()
    assert flat(patches)[wanted].all()


def test_the_future_never_reaches_the_past_at_any_byte(model) -> None:
    _, _, forward = model
    ids, entropies = sample(1)
    rng = np.random.default_rng(7)
    rows, rated = ids.repeat(LENGTH, 0), entropies.repeat(LENGTH, 0)
    for t in range(LENGTH):
        rows[t, t + 1 :] = rng.choice(rows[0], LENGTH - 1 - t)
        rated[t, t + 1 :] = rng.random(LENGTH - 1 - t)
    segments = np.ones((ROWS, LENGTH), np.int32)
    alone = jax.device_get(forward(ids.repeat(ROWS, 0), entropies.repeat(ROWS, 0), segments)[::2])
    for first in range(0, LENGTH, ROWS):
        moved = rows[first : first + ROWS], rated[first : first + ROWS]
        found = jax.device_get(forward(*moved, segments)[::2])
        for i in range(ROWS):
            seen = first + i + 1
            for other, same in zip(found, alone, strict=True):
                np.testing.assert_allclose(other[i, :seen], same[0, :seen], **tol(jnp.float32, 512))
            if seen < LENGTH:
                assert np.abs(found[0][i, seen:] - alone[0][0, seen:]).max() > 1e-3
    assert np.isfinite(alone[0]).all()


def test_packed_documents_equal_documents_apart(model) -> None:
    _, _, forward = model
    ids, entropies = sample(1)
    segments = np.array([[1] * 27 + [0] * 5 + [2] * 20 + [0] * 4], np.int32)
    repeat = lambda x: x.repeat(ROWS, 0)  # noqa: E731
    together, _, p, _ = jax.device_get(forward(repeat(ids), repeat(entropies), repeat(segments)))
    for start, stop in ((0, 27), (32, 52)):
        row = [np.pad(x[:, start:stop], ((0, 0), (0, LENGTH - stop + start))) for x in (ids, entropies)]
        own = np.arange(LENGTH)[None] < stop - start
        alone, _, q, _ = jax.device_get(forward(*map(repeat, row), repeat(own.astype(np.int32))))
        for joined, apart in ((together, alone), (p, q)):
            np.testing.assert_allclose(
                joined[0, start:stop], apart[0, : stop - start], **tol(jnp.float32, 512)
            )


@pytest.mark.slow(days=28, group="costly")
def test_byte_by_byte_and_piece_by_piece_equal_the_parallel_pass(model) -> None:
    """Also the decisions, wherever p is not within rounding of 1/2."""
    module, params, forward = model
    ids, entropies = sample(seed=3)
    ones = np.ones_like(ids)
    logits, patches, p, _ = forward(ids, entropies, ones)
    step = jax.jit(partial(module.apply, method="step"))
    state, out = module.init_state(ROWS, num_bytes=LENGTH), []
    for t in range(LENGTH):
        row, closed, state = step({"params": params}, ids[:, t], state, entropies=entropies[:, t])
        out.append(jax.device_get((row, closed)))
    got, closed = (np.stack(columns, 1) for columns in zip(*out, strict=True))
    clear = np.asarray(decided(PATCHER, p, jnp.asarray(ones), error=1e-5))
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(closed[clear], flat(patches)[clear])
    np.testing.assert_allclose(got, np.asarray(logits), **tol(jnp.float32, 1024))
    prefill = jax.jit(partial(module.apply, method="prefill"))
    piece = 2 * BLOCK
    fed, after = module.init_state(ROWS, num_bytes=LENGTH), None
    for start in range(0, LENGTH, piece):
        part = [
            np.pad(x, ((0, 0), (0, -LENGTH % piece)))[:, start : start + piece]
            for x in (ids, entropies, ones)
        ]
        after, fed = prefill({"params": params}, part[0], fed, segment_ids=part[2], entropies=part[1])
    np.testing.assert_allclose(after, got[:, -1], **tol(jnp.float32, 1024))
    stream, rows = jax.jit(partial(module.apply, method="stream")), []
    streamed = module.init_state(ROWS, num_bytes=LENGTH)
    for start in range(0, LENGTH, BLOCK // 2):
        part = [x[:, start : start + BLOCK // 2] for x in (ids, entropies, ones)]
        row, streamed = stream({"params": params}, part[0], streamed, segment_ids=part[2], entropies=part[1])
        rows.append(row)
    np.testing.assert_allclose(np.concatenate(rows, 1), np.asarray(logits), **tol(jnp.float32, 1024))
    for name in ("router", "smoothed", "recent"):
        expected = jax.tree.leaves(getattr(state, name))
        for way in (fed, streamed):
            for one, other in zip(jax.tree.leaves(getattr(way, name)), expected, strict=True):
                np.testing.assert_allclose(one, other, **tol(jnp.float32, 512))


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize("unmerge", ["gather", "attention"])
def test_given_patches_override_the_hard_decisions_alone(unmerge: str) -> None:
    """Bytes one by one equal the parallel pass under the same decisions, whatever p says of them."""
    module = config_of(BoundaryConfig(unmerge=unmerge)).build()
    ids, _ = sample(seed=4)
    cuts = np.random.default_rng(5).random(ids.shape) < 0.3
    patches = from_closed(jnp.asarray(cuts), jnp.ones_like(ids), block_size=BLOCK, capacity=8)
    params = drawn(module, ids, patches=patches)["params"]
    logits, used = jax.jit(module.apply)({"params": params}, ids, patches=patches)
    decoder = config_of(BoundaryConfig(unmerge=unmerge)).build(
        patcher=dataclasses.replace(PATCHER, reads_entropies=False, capacity=8)
    )
    step = jax.jit(partial(decoder.apply, method="step"))
    state, out = decoder.init_state(ROWS, num_bytes=LENGTH), []
    for t in range(LENGTH):
        row, _, state = step({"params": params}, ids[:, t], state, closed=flat(used)[:, t])
        out.append(np.asarray(row))
    np.testing.assert_allclose(np.stack(out, 1), np.asarray(logits), **tol(jnp.float32, 1024))


@pytest.mark.slow(days=28, group="costly")
def test_patches_of_one_byte_come_back_as_they_are() -> None:
    """Smoothing with p = 1, then U = 1: each byte gets its own vector, and the gradient comes back."""
    z = np.random.default_rng(6).standard_normal((1, 8, 4)).astype(np.float32)
    given = {"latest": jnp.arange(8)[None, None], "valid": jnp.ones((1, 1, 8), bool)}
    params = {"params": {"up": {"kernel": jnp.eye(4)}}}

    def merged(z):
        smoothed, _ = smooth(z, jnp.ones((1, 8)), jnp.ones((1, 8), jnp.int32))
        return LatestPatch().apply(params, z[:, None], smoothed[:, None], **given)[:, 0]

    @jax.jit
    def passes(z):
        found, pull = jax.vjp(merged, z)
        return found, pull(jnp.ones_like(found))[0]

    found, gradient = passes(z)
    np.testing.assert_allclose(found, z, atol=1e-3)
    np.testing.assert_allclose(gradient, np.ones_like(z), atol=1e-3)


@pytest.mark.slow(days=28, group="gradients")
def test_every_scorer_and_gate_has_a_gradient(model) -> None:
    """Of the predictions' loss by itself, without the ratio loss; separations are measured, and have none."""
    module, params, _ = model
    ids, entropies = map(jnp.asarray, sample())

    def loss(params):
        logits, _ = module.apply({"params": params}, ids, entropies=entropies)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], 2))

    gradients = jax.jit(jax.grad(loss))(params)
    parts = {name: gradients[name] for name in ("router", "keep", "down")}
    for path, leaf in jax.tree_util.tree_leaves_with_path(parts):
        assert np.isfinite(leaf).all(), path
        assert (np.abs(leaf).max() > 0) == ("separation" not in jax.tree_util.keystr(path)), path


@pytest.mark.slow(days=28, group="costly")
def test_no_gradient_adds_bytes_to_a_patch_by_atomics() -> None:
    """A GPU's atomic sums of many bytes into one row are slow."""
    config = dataclasses.replace(config_of(BoundaryConfig()), hash=None)
    module = config.build(patcher=dataclasses.replace(PATCHER, reads_entropies=False))
    ids = jnp.asarray(sample()[0])
    params = jax.eval_shape(module.init, jax.random.key(0), ids)
    program = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(module.apply(params, ids)[0])))(params)
    sums = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "scatter-add"]
    atomic = [eqn.invars[2].aval.shape[:-1] for eqn in sums if not eqn.params["unique_indices"]]
    assert atomic  # of the few patches before each block
    assert all(np.prod(rows) < ids.size / 2 for rows in atomic), atomic


def test_bytes_pass_the_gather_from_the_first_step_on() -> None:
    """A W of zeros would learn along the mean of h first, and bytes would hardly be told apart."""
    h = jax.random.normal(jax.random.key(0), (1, 3, 8))
    found, _ = keep_bytes(jnp.float32, 8).init_with_output(jax.random.key(1), h)
    np.testing.assert_array_equal(found, h)


def test_what_does_not_fit_is_named() -> None:
    config, ids = config_of(), np.full((1, 8), 70, np.int32)
    with pytest.raises(ValueError, match=r"mode 'space' and model.router .* do not fit"):
        config.build(patcher=PatcherConfig(mode="space"))
    with pytest.raises(
        ValueError, match="reads_entropies is False, and the router's strategy 'adaptive_hybrid'"
    ):
        config.build(patcher=PatcherConfig(mode="learned"))
    module = config.build(patcher=PATCHER)
    with pytest.raises(ValueError, match="the router scores by entropies, and the call has none"):
        jax.eval_shape(module.init, jax.random.key(0), ids)
    assert config.vocab_size == VOCAB_SIZE
