import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.patching import byte_entropies, entropies_from_logits, stream_entropies
from tests.tolerances import tol

V, D = 260, 6
stream = jax.jit(stream_entropies, static_argnums=0, static_argnames="chunk")
one_pass = jax.jit(byte_entropies, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(keys[0], (V, D)),
        "decay": jax.nn.sigmoid(jax.random.normal(keys[1], (D,))),
        "out": jax.random.normal(keys[2], (D, V)),
    }


def recurrence(params, ids, state, *, segment_ids):
    """s_t = decay s_{t-1} + embed(x_t), from zero at each document; a token of segment 0 changes nothing."""

    def step(carry, inputs):
        memory, document = carry
        x, segment = inputs
        same = (segment == document)[:, None]
        new = jnp.where(same, memory, 0.0) * params["decay"][None] + params["embed"][x]
        live = segment > 0
        carry = jnp.where(live[:, None], new, memory), jnp.where(live, segment, document)
        return carry, carry[0] @ params["out"]

    state, logits = jax.lax.scan(step, state, (ids.T, segment_ids.T))
    return logits.swapaxes(0, 1), state


def start(rows: int):
    return jnp.zeros((rows, D)), jnp.zeros((rows,), jnp.int32)


def apply(params, ids, *, segment_ids, positions):
    del positions
    segments = jnp.ones(ids.shape, jnp.int32) if segment_ids is None else segment_ids
    return recurrence(params, ids, start(ids.shape[0]), segment_ids=segments)


def test_entropy_is_that_of_the_softmax():
    logits = np.random.default_rng(0).normal(0, 3, (5, 7, V))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = -(p * np.log(p)).sum(-1)
    found = entropies_from_logits(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(found, expected, **tol(jnp.float32, n=V))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_without_a_softmax_have_no_entropy(bad):
    logits = jnp.asarray([[0.0, bad, 1.0], [0.0, -np.inf, 0.0]], jnp.float32)
    found = np.asarray(entropies_from_logits(logits))
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1], np.log(2), **tol(jnp.float32, n=3))


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_known_and_extreme_logits(shift):
    uniform = jnp.full((V,), shift)
    np.testing.assert_allclose(entropies_from_logits(uniform), np.log(V), **tol(jnp.float32, n=V))
    certain = jnp.full((V,), -1e4 + shift).at[3].set(shift)
    assert float(entropies_from_logits(certain)) == 0.0
    pair = jnp.full((V,), -jnp.inf).at[jnp.array([3, 9])].set(shift)
    np.testing.assert_allclose(entropies_from_logits(pair), np.log(2), **tol(jnp.float32))


def test_logits_in_bf16_give_fp32():
    assert entropies_from_logits(jnp.ones((2, V), jnp.bfloat16)).dtype == jnp.float32


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(("length", "chunk"), [(96, 32), (96, 96), (91, 16), (7, 32)])
def test_a_stream_in_chunks_equals_one_pass(params, length, chunk):
    ids = jax.random.randint(jax.random.key(1), (2, length), 4, V)
    once = one_pass(apply, params, ids)
    streamed = stream(recurrence, params, ids, start(2), chunk=chunk)
    np.testing.assert_allclose(streamed, once, **tol(jnp.float32, n=V))


@pytest.mark.slow(days=28, group="costly")
def test_a_stream_of_documents_with_padding(params):
    ids = jax.random.randint(jax.random.key(2), (2, 60), 4, V)
    segments = jnp.asarray([[1] * 25 + [2] * 35, [1] * 40 + [0] * 20], jnp.int32)
    once = one_pass(apply, params, ids, segment_ids=segments)
    streamed = stream(recurrence, params, ids, start(2), segment_ids=segments, chunk=16)
    np.testing.assert_allclose(streamed, once, **tol(jnp.float32, n=V))
    assert not np.asarray(streamed)[1, 40:].any()
    alone = one_pass(apply, params, ids[:1, 25:])
    np.testing.assert_allclose(streamed[:1, 25:], alone, **tol(jnp.float32, n=V))


def test_the_model_is_frozen(params):
    ids = jnp.full((1, 8), 70)
    grads = jax.jit(jax.grad(lambda p: byte_entropies(apply, p, ids).sum()))(params)
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))
    grads = jax.jit(jax.grad(lambda p: stream_entropies(recurrence, p, ids, start(1), chunk=4).sum()))(params)
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))
