"""Norms from Gram matrices, codes within bounds, and bounds that follow how often they are reached."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.adapters import AdapterConfig, Governor, attach, fuse
from jaxblt.adapters.update.governor import bounded, grams, square_norm
from jaxblt.data import Batch
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from tests.parameters import drawn

SCALE, RANK = 2.0, 6


def drawn_site(seed=0):
    rng = np.random.default_rng(seed)
    v, u = rng.standard_normal((20, RANK)), rng.standard_normal((RANK, 16))
    return jnp.asarray(v.astype(np.float32)), jnp.asarray(u.astype(np.float32))


def codes(numbers, count=8):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.standard_normal((1, count, numbers)).astype(np.float32))


def singular_values(v, u, code):
    """Of dW at each code, by SVD in double precision."""
    full = np.repeat(np.asarray(code, np.float64), RANK // code.shape[-1], -1)[0]
    return np.stack([np.linalg.svd(SCALE * (np.asarray(v) * c) @ np.asarray(u))[1] for c in full])


NORMS = {"frobenius": lambda s: np.sqrt((s**2).sum(-1)), "spectral": lambda s: s.max(-1)}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_those_of_the_svd(norm):
    for seed, numbers in ((0, RANK), (1, 3), (2, 1)):
        v, u = drawn_site(seed)
        code = codes(numbers)
        square = jax.jit(lambda v, u, c: square_norm(Governor(norm), c, *grams(v, u, SCALE)))(v, u, code)
        np.testing.assert_allclose(np.sqrt(square[0]), NORMS[norm](singular_values(v, u, code)), rtol=1e-3)
        assert square[0].std() > 0 or numbers == 1


@pytest.mark.parametrize("norm", NORMS)
def test_bounds_hold_and_what_is_within_them_stays(norm):
    (v, u), code = drawn_site(), codes(RANK)
    before = NORMS[norm](singular_values(v, u, code))
    tau = float(np.median(before)) * 1.01
    limit = jax.jit(lambda c, v, u, tau: bounded(Governor(norm), tau, c, *grams(v, u, SCALE)))
    found, rate = limit(code, v, u, jnp.float32(tau))
    after = NORMS[norm](singular_values(v, u, found))
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-3)
    within = before < tau
    np.testing.assert_array_equal(found[0][within], code[0][within])
    assert rate == 1 - within.mean()
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(limit(*args)[0] ** 2), argnums=(0, 1, 2, 3)))
    for given in ((code, v, u), (code, v, u * 0), (code * 0, v, u)):
        of_code, of_v, of_u, of_tau = gradient(*given, jnp.float32(tau))
        assert all(np.isfinite(g).all() for g in (of_code, of_v, of_u))
        assert of_tau == 0
    assert limit(code * 0, v, u, jnp.float32(tau))[1] == 0


def test_tau_settles_where_few_codes_are_over_it():
    """Norms are uniform in 0..4: tau comes to rest between the quantiles of 90 and 98 %, from either side."""
    rule = Governor(start=1.0)
    settle = jax.jit(
        lambda tau: jax.lax.scan(lambda t, _: (rule.next_tau(t, 1 - t / 4),) * 2, tau, None, length=150)[1]
    )
    for begin in (0.5, 4.9):
        found = np.asarray(settle(jnp.float32(begin)))
        assert 3.6 <= found[-1] <= 3.92
        assert found[-1] == found[-20]
    assert rule.next_tau(jnp.float32(4.9), jnp.float32(1)) == 5
    assert rule.next_tau(jnp.float32(0.1), jnp.float32(0)) == np.float32(0.1)


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_governor")
def test_a_step_bounds_the_next_one():
    """tau moves after the pass that it bounds; it has no gradient; a merged model is bounded as well."""
    stack = StackConfig(dim=8, num_layers=2, pattern=("recurrence",), mlp_dim=8)
    adapter = AdapterConfig(sites=("mlp/*",), rank=2, governor=Governor(start=0.5))
    config = attach(ByteLMConfig(stack=stack), adapter)
    model = config.build()
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 12)), jnp.int32)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full_like(x, 0.5) if path[-1].key == "tau" else x, drawn(model, ids)["params"]
    )
    batch = Batch(
        ids, ids, jnp.ones_like(ids), jnp.broadcast_to(jnp.arange(12)[None], ids.shape), jnp.ones(ids.shape)
    )
    optimizer = optax.sgd(0.0)
    step = make_train_step(Task(model), optimizer, accumulate=2)
    state, metrics = step(start(jax.tree.map(jnp.copy, params), optimizer), batch)
    moved = 0
    for path, x in jax.tree_util.tree_leaves_with_path(state.params):
        if path[-1].key == "tau":
            names = [entry.key for entry in path[:-1]]
            rate = metrics["/".join([*names, "violations"])]
            assert rate == 1  # drawn updates are large
            np.testing.assert_allclose(x, np.full((2, 1), 0.525), rtol=1e-6)
            moved += 1
    assert moved == 3
    plain, merged = fuse(config, params)
    logits = jax.jit(lambda p: model.apply({"params": p}, ids)[0])(params)
    other = jax.jit(lambda p: plain.build().apply({"params": p}, ids)[0])(merged)
    np.testing.assert_allclose(logits, other, rtol=1e-4, atol=1e-5)
    free = jax.tree_util.tree_map_with_path(lambda path, x: x * 1e3 if path[-1].key == "tau" else x, params)
    _, larger = fuse(config, free)
    sizes = [
        np.abs(p["stack"]["periods"]["block_0"]["mlp"]["down"]["kernel"]).max() for p in (merged, larger)
    ]
    assert sizes[1] > sizes[0] + 0.1
