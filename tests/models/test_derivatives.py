"""Derivatives of any order inside `jaxblt.reference_ops`: forward mode, and Hessian-vector products two ways."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.models import BLTConfig, HashConfig, StackConfig
from jaxblt.patching.patches import from_closed
from jaxblt.testing.tolerances import DIFFERENCED, bound, typical

LENGTH, BLOCK = 32, 8
# Products of a Hessian sum over every position, channel and parameter that two derivatives meet in.
TERMS = 4096


def stack(pattern, dim, filter):
    heads = AttentionConfig(dim=dim, num_heads=2)
    mixers = {"attention": heads, "hyena": HyenaConfig(dim=dim, filter=filter)}
    return StackConfig(dim=dim, num_layers=len(pattern), pattern=pattern, window=5, mlp_dim=12, **mixers)


def blt_loss():
    """Of a BLT that holds every mixer, on static patches of 3 bytes: two documents, holes and padding."""
    config = BLTConfig(
        encoder=stack("SW", 8, ModalFilter(modes=2)),
        latent=stack("HAR", 12, ModalFilter(modes=2, max_timescale=16.0)),
        decoder=stack("H", 8, ImplicitFilter(filter_len=600, width=4)),
        hash=HashConfig(sizes=(3,), table_size=16),
        bridge_heads=2,
        look_back=2,
    )
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, LENGTH)), jnp.int32)
    places = np.arange(LENGTH)
    segments = jnp.asarray(np.stack([1 + (places >= 16), places < 27]), jnp.int32)
    closed = jnp.broadcast_to(jnp.asarray(places % BLOCK % 3 == 2), segments.shape)
    patches = from_closed(closed, segments, block_size=BLOCK, capacity=4)
    model = config.build()
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), ids, patches, segment_ids=segments))

    def loss(params):
        logits = model.apply(params, ids, patches, segment_ids=segments)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], 2)[..., 0]
        return -jnp.mean(jnp.where(segments[:, 1:] > 0, log_p, 0.0))

    # larger than at the start, so that every part bends the loss by more than rounding
    return loss, jax.tree.map(lambda p: 1.5 * p if p.ndim > 1 else p, params)


def mixer_loss(config, segments=None):
    """The mean of a bounded function of one mixer's outputs."""
    model = config.build()
    x = jax.random.normal(jax.random.key(1), (2, 12, config.dim))
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), x, segment_ids=segments))
    return lambda params: jnp.mean(jnp.tanh(model.apply(params, x, segment_ids=segments)[0] + x)), params


HOLES = [[1] * 4 + [-1] * 2 + [1] * 6, [1] * 9 + [0] * 3]
DOCUMENTS = [[1] * 5 + [2] * 7, [1] * 2 + [2] * 8 + [0] * 2]

CASES = {
    "blt": blt_loss,
    "attention_sorted": lambda: mixer_loss(AttentionConfig(dim=8, num_heads=2, packed=False), HOLES),
    "attention_both": lambda: mixer_loss(
        AttentionConfig(dim=8, num_heads=2, num_kv_heads=1, causal=False, window=3), DOCUMENTS
    ),
    "recurrence": lambda: mixer_loss(GatedRecurrenceConfig(dim=4), DOCUMENTS),
}


def assert_alike(actual, expected, limit):
    """Euclidean distance of two trees, as a share of the second's length."""
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (actual, expected)]
    assert np.isfinite(flat[0]).all()
    assert typical(*flat) <= limit


def moved(params, direction, step):
    return jax.tree.map(lambda p, d: p + step * d, params, direction)


def difference(f, params, direction, step=0.01):
    """The derivative of a tree along a direction, by differences of fourth order."""
    at = {n: f(moved(params, direction, n * step)) for n in (-2, -1, 1, 2)}
    return jax.tree.map(
        lambda a, b, c, d: (8 * (c - b) - (d - a)) / (12 * step), at[-2], at[-1], at[1], at[2]
    )


@pytest.mark.parametrize("name", CASES)
def test_derivatives_agree_in_both_modes_and_with_differences(name):
    loss, params = CASES[name]()
    key = jax.random.key(2)
    direction = jax.tree.map(
        lambda p: 0.1 * jax.random.normal(jax.random.fold_in(key, p.size), p.shape), params
    )
    grad = jax.grad(loss)
    dot = lambda a, b: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))  # noqa: E731

    @jax.jit
    def derivatives(params):
        value, slope = jax.jvp(loss, (params,), (direction,))
        gradient, forward = jax.jvp(grad, (params,), (direction,))
        backward = jax.grad(lambda p: dot(grad(p), direction))(params)
        return value, slope, gradient, forward, backward

    plain = jax.jit(jax.value_and_grad(loss))
    with jaxblt.reference_ops():
        value, slope, gradient, forward, backward = derivatives(params)
    expected, expected_gradient = plain(params)
    limit = bound(jnp.float32, TERMS)
    np.testing.assert_allclose(value, expected, rtol=limit)
    assert_alike(gradient, expected_gradient, limit)
    np.testing.assert_allclose(slope, dot(gradient, direction), rtol=limit, atol=limit)
    assert_alike(forward, backward, limit)
    assert_alike(forward, difference(lambda p: plain(p)[1], params, direction), DIFFERENCED)
