"""Two levels of learned patches: documents apart, byte by byte, piece by piece, and trained through every gate."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, RouterConfig, attach
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.mixers import AttentionConfig
from jaxblt.models import LevelConfig, StackConfig
from jaxblt.models.hidden import hidden_states, layers_of
from jaxblt.models.level import Level
from jaxblt.patching.learned import BoundaryConfig, calibrate_router
from jaxblt.patching.patches import from_closed
from tests.mixer_table import table
from tests.models.test_learned import BLOCK, LENGTH, PATCHER, ROWS, TARGET, config_of, sample
from tests.parameters import drawn
from tests.tolerances import tol

PATCHES = dataclasses.replace(PATCHER, reads_entropies=False)
WINDOW = table(attention=AttentionConfig(dim=20, num_heads=2), window=5)
LOCAL = StackConfig(dim=20, num_layers=1, pattern="W", mlp_dim=0, mixers=WINDOW)
CONFIG = dataclasses.replace(
    config_of(BoundaryConfig()), level=LevelConfig(encoder=LOCAL, decoder=LOCAL, slots_per_group=2.0)
)


@pytest.fixture(scope="module")
def model():
    """The module, parameters whose routers cut at their targets' rates, and the compiled pass."""
    module, (ids, _) = CONFIG.build(patcher=PATCHES), sample()
    params = drawn(module, ids)["params"]
    for path, method, target in (((), "route", TARGET), (("level",), "route_slots", 2.0)):
        found = jax.jit(partial(module.apply, method=method))({"params": params}, ids)
        scores, here = found if path else (found[1], np.broadcast_to(np.arange(LENGTH) > 0, ids.shape))
        inner = params[path[0]] if path else params
        router = calibrate_router(
            BoundaryConfig(), inner["router"], np.asarray(scores), here=np.asarray(here), target=target
        )
        inner["router"] = router
    forward = jax.jit(
        lambda params, ids, segments: module.apply({"params": params}, ids, segment_ids=segments)
    )
    return module, params, partial(forward, params)


@pytest.mark.slow(days=7, group="weekly", turn="models/test_level")
def test_packed_documents_equal_documents_apart(model) -> None:
    _, _, forward = model
    ids = sample()[0]
    segments = np.array([[1] * 27 + [0] * 5 + [2] * 20 + [0] * 4], np.int32).repeat(ROWS, 0)
    together, _ = forward(ids, segments)
    for start, stop in ((0, 27), (32, 52)):
        row = np.pad(ids[:, start:stop], ((0, 0), (0, LENGTH - stop + start)))
        own = (np.arange(LENGTH)[None] < stop - start).astype(np.int32).repeat(ROWS, 0)
        alone, _ = forward(row, own)
        np.testing.assert_allclose(together[:, start:stop], alone[:, : stop - start], **tol(jnp.float32, 512))


@pytest.mark.slow(days=7, group="weekly", turn="models/test_level")
def test_byte_by_byte_and_piece_by_piece_equal_the_parallel_pass(model) -> None:
    module, params, forward = model
    ids = sample(seed=3)[0]
    ones = np.ones_like(ids)
    logits, _ = forward(ids, ones)
    step = jax.jit(partial(module.apply, method="step"))
    state, out = module.init_state(ROWS, num_bytes=LENGTH), []
    for t in range(LENGTH):
        row, _, state = step({"params": params}, ids[:, t], state)
        out.append(np.asarray(row))
    np.testing.assert_allclose(np.stack(out, 1), np.asarray(logits), **tol(jnp.float32, 1024))
    prefill, piece = jax.jit(partial(module.apply, method="prefill")), 2 * BLOCK
    fed, after = module.init_state(ROWS, num_bytes=LENGTH), None
    for start in range(0, LENGTH, piece):
        part = [np.pad(x, ((0, 0), (0, -LENGTH % piece)))[:, start : start + piece] for x in (ids, ones)]
        after, fed = prefill({"params": params}, part[0], fed, segment_ids=part[1])
    np.testing.assert_allclose(after, out[-1], **tol(jnp.float32, 1024))
    for one, other in zip(jax.tree.leaves(fed.latent), jax.tree.leaves(state.latent), strict=True):
        np.testing.assert_allclose(one, other, **tol(jnp.float32, 512))


@pytest.mark.slow(days=28, group="decoding")
def test_a_few_bytes_at_a_time_equal_the_parallel_pass(model) -> None:
    module, params, forward = model
    ids = sample(seed=3)[0]
    logits, _ = forward(ids, np.ones_like(ids))
    stream, rows = jax.jit(partial(module.apply, method="stream")), []
    state = module.init_state(ROWS, num_bytes=LENGTH)
    for start in range(0, LENGTH, BLOCK // 2):
        part = ids[:, start : start + BLOCK // 2]
        row, state = stream({"params": params}, part, state, segment_ids=np.ones_like(part))
        rows.append(row)
    np.testing.assert_allclose(np.concatenate(rows, 1), np.asarray(logits), **tol(jnp.float32, 1024))


@pytest.mark.slow(days=28, group="decoding")
def test_groups_keep_to_their_limits_in_both_passes() -> None:
    """With every slot's p above 1/2 groups have two slots each, and with none three; slot by slot as in one pass."""
    level = dataclasses.replace(CONFIG.level, min_slots=2, max_slots=3)
    module, (ids, _) = dataclasses.replace(CONFIG, level=level).build(patcher=PATCHES), sample(2)
    params, ids = drawn(module, ids)["params"], jnp.asarray(ids)
    options = {"segment_ids": jnp.ones_like(ids), "mutable": "metrics"}
    forward = jax.jit(lambda params: module.apply({"params": params}, ids, **options))
    step = jax.jit(partial(module.apply, method="step"))
    for theta in (-9.0, 9.0):
        params["level"]["router"]["theta"] = jnp.full((1,), theta)
        (logits, patches), told = forward(params)
        state, out = module.init_state(len(ids), num_bytes=LENGTH), []
        for t in range(LENGTH):
            row, _, state = step({"params": params}, ids[:, t], state)
            out.append(np.asarray(row))
        np.testing.assert_allclose(np.stack(out, 1), np.asarray(logits), **tol(jnp.float32, 1024))
        assert float(told["metrics"]["level"]["overflow"][0].value) == 0.0
    assert patches.capacity == PATCHES.slots


def test_limits_of_groups_by_hand() -> None:
    level = dataclasses.replace(CONFIG.level, min_slots=2, max_slots=3)
    segments = jnp.asarray([[1, 1, 1, 1, 1, 1, 1, -1]], jnp.int32)
    find = jax.jit(lambda p: Level(level, None)._wanted(p, segments, 8))
    for p, wanted in ((0.9, [0, 1, 0, 1, 0, 1, 0, 0]), (0.1, [0, 0, 1, 0, 0, 1, 0, 0])):
        np.testing.assert_array_equal(find(jnp.full((1, 8), p))[0], wanted)


@pytest.mark.slow(days=28, group="gradients")
def test_every_scorer_and_gate_has_a_gradient_and_each_level_a_ratio(model) -> None:
    module, params, _ = model
    ids = jnp.asarray(sample()[0])

    def loss(params):
        (logits, _), told = module.apply({"params": params}, ids, mutable=["losses", "metrics"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], ids[:, 1:, None], 2)), told

    gradients, told = jax.jit(jax.grad(loss, has_aux=True))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        {n: gradients[n] for n in ("router", "level", "latent")}
    ):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path
    assert {"router", "level"} <= told["losses"].keys()
    rate = float(jax.tree.leaves(told["metrics"]["level"]["router"]["cut_rate"])[0])
    assert 0.3 < rate < 0.7


@pytest.mark.slow(days=28, group="decoding")
def test_a_prompt_is_read_with_the_adapters_that_rows_choose() -> None:
    router = RouterConfig(reads=(ChunkMean(),), chunk=4, hidden=4)
    adapter = AdapterConfig(sites=("mixer/out",), rank=4, blocks=2, alpha=16.0, router=router)
    config, ids = attach(CONFIG, adapter, stacks=("latent",)), jnp.asarray(sample(2)[0])
    module, ones = config.build(patcher=PATCHES), jnp.ones_like(ids)
    params, state = drawn(module, ids)["params"], module.init_state(2, num_bytes=LENGTH)
    prefill = jax.jit(partial(module.apply, method="prefill"))

    def read(adapters):
        given = {"params": params, "chosen": choose_adapters(config, adapters)}
        return prefill(given, ids, state, segment_ids=ones)[0]

    one, other = read([0, 1]), read([1, 1])
    assert np.abs(one[0] - other[0]).max() > 1e-2
    np.testing.assert_allclose(one[1], other[1], **tol(jnp.float32, 1024))


def test_states_of_groups_are_refused_though_a_block_has_as_many_as_slots() -> None:
    level = dataclasses.replace(CONFIG.level, slots_per_group=1.05)
    module = dataclasses.replace(CONFIG, level=level).build(patcher=PATCHES)
    assert level.groups(PATCHES.slots) == PATCHES.slots
    (layer, *_) = (layer for layer in layers_of(module) if layer.of_patches)
    with pytest.raises(ValueError, match=r"layer latent/.* is of groups of patches"):
        hidden_states(module, {}, layer, jnp.asarray(sample(1)[0]))


def test_a_block_that_ends_in_holes_ends_its_last_group() -> None:
    """The last live slot closes though the block has no room for another group."""
    segments = np.array([[1, 1, 1, -1, 1, 1, 1, 1]], np.int32)
    cuts = np.array([[1, 1, 1, 0, 1, 1, 0, 1]], bool)
    last = np.array([[0, 0, 1, 0, 0, 0, 0, 1]], bool)
    cut = jax.jit(partial(from_closed, block_size=4, capacity=2))
    groups = jax.device_get(cut(cuts, segments, last=last))
    np.testing.assert_array_equal(groups.closed[0], [[1, 0, 1, 0], [1, 0, 0, 1]])
    np.testing.assert_array_equal(groups.lengths[0], [[1, 2], [1, 3]])
    np.testing.assert_array_equal(groups.overflow[0], [1, 1])
