import math
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.parallel import MeshConfig
from jaxblt.random_keys import make_key
from jaxblt.training.optimisers.adamw import AdamWConfig, decay_mask, make_optimizer
from jaxblt.training.optimisers.norm import clip_by_global_norm, global_norm
from jaxblt.training.optimisers.schedule import for_rows, make_schedule
from tests.tolerances import assert_close


def test_schedule_has_its_golden_numbers():
    schedule = make_schedule(AdamWConfig(learning_rate=2e-3, warmup_steps=10, floor=0.1), 110)
    # linear to the peak at 10, half-way of the cosine at 60, floor from 110 on
    golden = {0: 0.0, 5: 1e-3, 10: 2e-3, 35: 2e-4 + 1.8e-3 * (1 + math.cos(math.pi / 4)) / 2, 60: 1.1e-3}
    golden |= {110: 2e-4, 5000: 2e-4}
    for step, rate in golden.items():
        np.testing.assert_allclose(float(schedule(step)), rate, rtol=1e-6, atol=1e-12)


def test_decay_can_end_before_the_run():
    schedule = make_schedule(AdamWConfig(learning_rate=1.0, warmup_steps=0, decay_steps=50, floor=0.25), 1000)
    assert float(schedule(0)) == 1.0
    assert float(schedule(50)) == float(schedule(1000)) == 0.25


@pytest.mark.parametrize(
    ("schedule", "golden"),
    [
        ("linear", {5: 1e-3, 10: 2e-3, 60: 1.1e-3, 110: 2e-4, 500: 2e-4}),
        ("wsd", {5: 1e-3, 10: 2e-3, 60: 2e-3, 88: 2e-3, 99: 1.1e-3, 110: 2e-4, 500: 2e-4}),
        ("constant", {5: 1e-3, 10: 2e-3, 60: 2e-3, 500: 2e-3}),
    ],
)
def test_other_shapes_have_their_golden_numbers(schedule, golden):
    config = AdamWConfig(learning_rate=2e-3, warmup_steps=10, floor=0.1, schedule=schedule)
    rates = make_schedule(config, 110)
    for step, rate in golden.items():
        np.testing.assert_allclose(float(rates(step)), rate, rtol=1e-6)


def test_a_share_of_decay_that_nothing_reads_is_refused():
    with pytest.raises(ValueError, match=r"optimizer.decay_share = 0.5 is read with schedule='wsd' only"):
        make_schedule(AdamWConfig(warmup_steps=1, decay_share=0.5), 110)


def test_a_warmup_into_the_decay_of_wsd_is_refused():
    with pytest.raises(ValueError, match=r"warmup_steps = 90 must be at most 88, where the decay"):
        make_schedule(AdamWConfig(warmup_steps=90, schedule="wsd"), 110)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps = 100 must be less than"):
        make_schedule(AdamWConfig(warmup_steps=100), 100)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_rate_for_so_many_rows_is_in_proportion_to_the_rows_of_a_step(schedule):
    config = AdamWConfig(learning_rate=1e-3, per_rows=256, warmup_steps=10, schedule=schedule)
    scaled, plain = for_rows(config, 64), replace(config, per_rows=None)
    assert (scaled.learning_rate, scaled.per_rows) == (1e-3 * 64 / 256, None)
    assert for_rows(plain, 64) == plain
    rates = [make_schedule(c, 110) for c in (scaled, plain)]
    for step in (5, 10, 60, 99, 110):
        np.testing.assert_allclose(float(rates[0](step)), float(rates[1](step)) / 4, rtol=1e-6)


def boxed(names, shape):
    return nn.LogicallyPartitioned(jax.device_put(np.ones(shape, np.float32)), names)


PARAMS = {
    "dense": {"kernel": boxed(("embed", "mlp"), (4, 8)), "bias": boxed(("mlp",), (8,))},
    "scanned": {
        "kernel": boxed(("layers", "embed", "mlp"), (2, 4, 8)),
        "scale": boxed(("layers", "norm"), (2, 4)),
    },
    "heads": {
        "kernel": boxed(("embed", "heads", "head_dim"), (4, 2, 2)),
        "bias": boxed(("heads", "head_dim"), (2, 2)),
        "own_scale": boxed(("heads", "head_dim"), (2, 2)),
    },
    "table": {"bytes": boxed(("vocab", "embed"), (9, 4))},
    "hash_ngrams": boxed(("hash", "embed"), (16, 4)),
    "head": {"kernel": boxed(("embed", "vocab"), (4, 9))},
    "filter": {
        "log_poles": boxed(("channels", "modes"), (4, 2)),
        "taps": boxed(("channels", "taps"), (4, 3)),
    },
    "plain": jnp.ones((4, 4)),
}


@pytest.mark.parametrize("embeddings", [False, True])
def test_only_matrices_decay(embeddings):
    mask = decay_mask(PARAMS, embeddings=embeddings)
    assert mask == {
        "dense": {"kernel": True, "bias": False},
        "scanned": {"kernel": True, "scale": False},
        "heads": {"kernel": True, "bias": False, "own_scale": False},
        "table": {"bytes": embeddings},
        "hash_ngrams": embeddings,
        "head": {"kernel": True},
        "filter": {"log_poles": False, "taps": False},
        "plain": True,
    }


def test_update_is_that_of_the_paper():
    config = AdamWConfig(
        learning_rate=0.1, warmup_steps=0, floor=1.0, weight_decay=0.5, clip_norm=1.0, b2=0.99
    )
    params = {"kernel": boxed(("embed", "mlp"), (2, 2)), "bias": boxed(("mlp",), (2,))}
    optimizer = make_optimizer(config, 10, params)
    values = nn.meta.unbox(params)
    state, step_of = optimizer.init(values), jax.jit(optimizer.update)
    m = v = {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)}
    expected = jax.tree.map(lambda x: np.asarray(x, np.float64), values)
    for step in range(1, 4):
        grads = {"kernel": jnp.full((2, 2), 3.0 / step), "bias": jnp.full((2,), -1.0 * step)}
        updates, state = step_of(grads, state, values)
        values = jax.tree.map(jnp.add, values, updates)
        g = jax.tree.map(lambda x: np.asarray(x, np.float64), grads)
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        g = {k: x / max(norm, 1.0) for k, x in g.items()}
        m = {k: 0.9 * m[k] + 0.1 * g[k] for k in g}
        v = {k: 0.99 * v[k] + 0.01 * g[k] ** 2 for k in g}
        for k, decay in (("kernel", 0.5), ("bias", 0.0)):
            adam = m[k] / (1 - 0.9**step) / (np.sqrt(v[k] / (1 - 0.99**step)) + 1e-8)
            expected[k] = expected[k] - 0.1 * (adam + decay * expected[k])
    for k in expected:
        np.testing.assert_allclose(values[k], expected[k], rtol=1e-5)


@pytest.mark.slow(days=28, group="costly")
def test_norm_and_clipping_are_those_of_optax() -> None:
    shapes = {"scalar": (), "scale": (5,), "matrix": (7, 3), "heads": (4, 2, 6), "none": (0, 3)}
    tree = {name: jax.random.normal(make_key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    wanted = optax.tree.norm(tree)
    assert_close(global_norm(tree), wanted, n=200)
    with jax.set_mesh(MeshConfig(data=2).build(jax.devices()[:2])):
        assert_close(jax.jit(global_norm)(tree), wanted, n=200)
    assert float(global_norm({})) == 0
    for most in (0.5, 100.0):
        clips = [make(most) for make in (clip_by_global_norm, optax.clip_by_global_norm)]
        (ours, state), (theirs, other) = (clip.update(tree, clip.init(tree)) for clip in clips)
        jax.tree.map(lambda a, b: assert_close(a, b, n=200), ours, theirs)
        assert state == other
    infinite = {"a": jnp.array([jnp.inf, 1.0])}
    assert not jnp.isfinite(global_norm(infinite))
