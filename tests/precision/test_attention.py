"""Attention in FP8 in a layer and in a train step: values, gradients, what is remembered, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.precision import AttentionPast, Fp8Config, attend_in_fp8, find_sites, first_amax, in_fp8
from jaxblt.training.log.meter import Cost
from jaxblt.training.log.report import describe
from jaxblt.training.start.setup import make_setup
from jaxblt.training.state import start
from jaxblt.training.step import Task, make_train_step
from pallas_kernels.attention import attention, masks
from pallas_kernels.runtime import Device, compiling_for
from tests.adapters.update.test_site import H200
from tests.parameters import drawn
from tests.training.tiny import random_batch, tiny_recipe

CONFIG = Fp8Config(scaling="delayed", history=2, attention=True)
LAYER = AttentionConfig(dim=128, num_heads=1)


def model(**changes):
    mixers = {"attention": replace(LAYER, **changes)}
    stack = StackConfig(dim=128, num_layers=1, pattern=("attention",), mixers=mixers, mlp_dim=128)
    return ByteLMConfig(stack=stack).build(dtype=jnp.bfloat16)


def heads(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, (1, 128, 2, 128), jnp.bfloat16) for key in keys]


def once(past, change=lambda q, k, v, do: (q, k, v, do)):
    *given, do = change(*heads())
    o, back = jax.vjp(attend_in_fp8, past, *given)
    return o, back(do * jnp.bfloat16(1e-4))


def remembered():
    """Three turns of the same heads: scales of values, then of scores, then of gradients of heads are known."""
    past = AttentionPast(*(jnp.zeros(2) for _ in AttentionPast._fields))
    for _ in range(3):
        past = jax.tree.map(lambda h, s: jnp.concatenate([s[:1], h[:-1]]), past, once(past)[1][0])
    return past


def test_values_and_gradients_are_those_of_bf16_within_fp8s_roundings():
    (q, k, v, do), past = heads(), remembered()
    o, (_, *gradients) = once(past)
    wanted, back = jax.vjp(lambda *a: attention(*a, masks.band(True, None)), q, k, v)
    pairs = zip((o, *gradients), (wanted, *back(do * jnp.bfloat16(1e-4))), strict=True)
    for found, exact in ((np.asarray(x, np.float64) for x in pair) for pair in pairs):
        assert 2.0**-7 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 2.0**-3
    entries = [np.asarray(x, np.float64) for x in (q, k, v, wanted)]
    np.testing.assert_allclose([h[0] for h in past[:4]], [np.abs(x).max() for x in entries], rtol=2.0**-4)


def test_what_is_not_finite_is_not_clipped():
    past = remembered()
    o, _ = once(past, lambda q, k, v, do: (q, k.at[0, 3, 0, 5].set(jnp.inf), v, do))
    assert np.isnan(np.asarray(o, np.float32)).all()
    _, (seen, dq, *_) = once(past, lambda q, k, v, do: (q, k, v, do.at[0, 0, 0, 0].set(jnp.nan)))
    assert np.isnan(np.asarray(dq, np.float32)).all()
    assert np.isnan(seen.do[0])


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("scan", [False, True])
def test_a_train_step_attends_in_fp8_and_remembers(scan):
    """Beside FP8's products, what attention adds moves weights no further from bf16's."""
    config = model().config
    module = replace(config, stack=replace(config.stack, scan=scan)).build(dtype=jnp.bfloat16)
    ids, still, batch = jnp.zeros((2, 128), jnp.int32), optax.sgd(0.0), random_batch(0, rows=2, length=128)
    init = lambda: module.init(jax.random.key(0), ids)["params"]  # noqa: E731
    alone = replace(CONFIG, keep=("*",))
    sites, boxed = find_sites(alone, lambda: jax.eval_shape(init))
    assert {path[-1] for path in sites} == {"mixer"}
    params, moved, state = drawn(module, ids)["params"], {}, None
    for name, fp8, amax in (("bf16", None, None), ("fp8", alone, {"amax": first_amax(alone, sites, boxed)})):
        warm = make_train_step(Task(module, fp8=fp8, packed=False), still)
        state = start(jax.tree.map(jnp.array, params), still, scaling=amax)
        for _ in range(3 if fp8 else 0):  # until all scales are those of the past
            state, _ = warm(state, batch)
        sgd = optax.sgd(1.0)
        state = start(jax.tree.map(jnp.array, params), sgd, scaling=state.scaling)
        state, _ = make_train_step(Task(module, fp8=fp8, packed=False), sgd)(state, batch)
        moved[name] = flatten_dict(jax.tree.map(lambda a, b: np.asarray(a - b), state.params, params))
    for path, exact in moved["bf16"].items():
        # Gradients of scores are small beside their parts, so roundings count for more behind them
        behind_scores = any(part in path for part in ("q", "k", "embedding", "mixer_norm"))
        error = np.linalg.norm(moved["fp8"][path] - exact) / np.linalg.norm(exact)
        assert 0 < error < (1 if behind_scores else 0.1), path
    assert state is not None
    layers = jax.tree.leaves(state.scaling)
    assert [x.shape[-2] for x in layers] == [9]
    assert all(np.all(np.asarray(x) > 0) for x in layers)


def test_dots_keeps_what_cudnn_returns_in_fp8_and_full_computes_it_again(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    ids = jnp.zeros((1, 128), jnp.int32)

    def passes(policy):
        """Count calls of cuDNN, of the forward and of the backward pass."""
        stack = replace(model().config.stack, remat=policy, scan=False)
        module = ByteLMConfig(stack=stack).build(dtype=jnp.bfloat16)
        with compiling_for(H200):
            init = lambda: module.init(jax.random.key(0), ids)["params"]  # noqa: E731
            sites, boxed = find_sites(CONFIG, lambda: jax.eval_shape(init))
            given = {"params": nn.meta.unbox(boxed), "fp8": first_amax(CONFIG, sites, boxed)}

            def loss(given):
                with in_fp8(CONFIG):
                    return jnp.sum(module.apply(given, ids)[0])

            text = str(jax.make_jaxpr(jax.grad(loss))(given))
        return [text.count(f"dot_product_attention_fp8_{name}") for name in ("fwd", "bwd")]

    assert [passes(policy) for policy in ("none", "dots", "full")] == [[1, 1], [1, 1], [2, 1]]


def test_what_cannot_attend_in_fp8_is_named():
    with pytest.raises(ValueError, match="attention=True needs scaling='delayed', got 'current'"):
        Fp8Config(attention=True)

    def sites(module, length=128):
        ids = jnp.zeros((1, length), jnp.int32)
        return find_sites(CONFIG, lambda: jax.eval_shape(lambda: module.init(jax.random.key(0), ids)))

    with pytest.raises(ValueError, match="finds no causal attention without a window"):
        sites(model(window=16))
    with pytest.raises(ValueError, match=r"mixer cannot attend in FP8: .* a length that divides by 128"):
        sites(model(), length=64)
    with pytest.raises(ValueError, match="and no ALiBi; use False"):
        sites(model(position="alibi"))
    for name, capability in (("L40S", (8, 9)), ("B200", (10, 0))):
        said = rf"takes a GPU of capability 9\.x, and this is {name}; use"
        with compiling_for(Device("gpu", capability, name)), pytest.raises(ValueError, match=said):
            sites(model())


def test_rows_that_may_hold_padding_are_refused_before_anything_is_compiled():
    """Parameters are drawn without segment ids, so only the data's config tells."""
    options = {"dtype": "bfloat16", "precision": "fp8", "fp8": CONFIG}
    recipe = tiny_recipe(model=model().config, mesh={"data": 1}, **options)
    recipe = replace(recipe, data=replace(recipe.data, seq_len=128, batch_size=2))
    mesh = recipe.mesh.build(jax.devices()[:1])
    with pytest.raises(
        ValueError, match=r"set data\.packing='windows' and data\.partial='drop', or use False"
    ):
        make_setup(recipe, mesh)
    full = replace(recipe, data=replace(recipe.data, partial="drop"))
    setup = make_setup(full, mesh)
    assert "mixer" in {path[-1] for path in setup.sites}
    lines = describe(setup, SimpleNamespace(num_bytes=None), [], Cost(byte=1.0, patch=0.0))
    assert "in bfloat16, 8 products and layers of attention in FP8" in lines
