"""Reinforcement of routers: rewards, credit and clipping by hand, exact gradients by enumeration, and a bandit."""

import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Draw, RouterConfig
from jaxblt.adapters.code.draw import POLICY, Choice, choices
from jaxblt.adapters.code.router import Router
from jaxblt.training.experimental.acting import acting_params, keep_routers
from jaxblt.training.experimental.policy import (
    PolicyConfig,
    advantages,
    clipped,
    find_flips,
    returns,
    surrogate,
)

IDS = jnp.asarray([[1] * 5 + [2] * 3 + [0], [1] * 9], jnp.int32)
MADE = jnp.asarray([[0, 1, 0, 1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 0, 0, 0, 1]], bool)


def test_returns_by_hand():
    """A document's later choices count by powers of the discount; another document's do not."""
    reward = jnp.asarray([[9.0, 1, 2, 4, 8, 1, 1, 3, 0], [9.0, 9, 9, 9, 1, 1, 1, 1, 2]])
    found = np.asarray(jax.jit(returns, static_argnums=3)(reward, MADE, IDS, 0.5))
    np.testing.assert_array_equal(found[0, [1, 3, 5, 7]], [3 + 6, 12, 2 + 1.5, 3])
    np.testing.assert_array_equal(found[1, [4, 8]], [4 + 1, 2])
    alone = np.asarray(jax.jit(returns, static_argnums=3)(reward, MADE, IDS, 0.0))
    np.testing.assert_array_equal(alone[0, [1, 3, 5, 7]], [3, 12, 2, 3])


def test_baselines_are_means_over_the_other_rows():
    given = np.where(MADE, np.arange(18, dtype=np.float32).reshape(2, 9), 99)
    first, second = given[0, [1, 3, 5, 7]], given[1, [4, 8]]
    found = np.asarray(jax.jit(advantages)(given, MADE))
    np.testing.assert_allclose(found[0, [1, 3, 5, 7]], first - second.mean(), rtol=1e-6)
    np.testing.assert_allclose(found[1, [4, 8]], second - first.mean(), rtol=1e-6)
    assert (np.asarray(found)[~np.asarray(MADE)] == 0).all()
    np.testing.assert_array_equal(np.asarray(jax.jit(advantages)(given[:1], MADE[:1]))[0, 1], given[0, 1])


def test_flips_are_within_a_document_and_not_its_first_choice():
    expert = jnp.asarray([[-1, 0, 0, 1, 1, 0, 0, 0, 0], [-1, -1, -1, -1, 2, 2, 2, 2, 0]], jnp.int32)
    wanted = np.zeros((2, 9), bool)
    wanted[0, 3] = wanted[1, 8] = True
    np.testing.assert_array_equal(find_flips(expert, MADE, IDS), wanted)


def test_the_clip_by_hand():
    """With clip .2: a ratio of 1.5 pays at most 1.2 for a gain and all of 1.5 for a loss; .5 likewise below."""
    q = jnp.asarray([[1.5, 1.5, 0.5, 0.5, 1.1, 0.9, 2.0]])
    advantage = jnp.asarray([[2.0, -2.0, 2.0, -2.0, 3.0, -3.0, 0.0]])
    value, slope = jax.jvp(lambda x: clipped(x, advantage, 0.2), (jnp.log(q),), (jnp.ones_like(q),))
    np.testing.assert_allclose(value, [[2.4, -3.0, 1.0, -1.6, 3.3, -2.7, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[0.0, -3.0, 1.0, 0.0, 3.3, -2.7, 0.0]], rtol=1e-6)


def test_ppo_sums_by_hand():
    """Two choices in a row of its own each: the ratios are 1.5 and .9, the advantages 3 - 1 and 1 - 3."""
    ids, made = jnp.ones((2, 1), jnp.int32), jnp.ones((2, 1), bool)
    old = Choice(jnp.zeros((2, 1), jnp.int32), jnp.log(jnp.asarray([[0.4], [0.5]])), made)
    now = old.replace(log_p=jnp.log(jnp.asarray([[0.6], [0.45]])))
    gain = jnp.asarray([[3.0], [1.0]])
    loss, sums = jax.jit(partial(surrogate, PolicyConfig("ppo")))([now], [old], gain, ids)
    np.testing.assert_allclose(loss, -(1.2 * 2 - 0.9 * 2), rtol=1e-5)
    kl = (0.5 - np.log(1.5)) + (-0.1 - np.log(0.9))
    wanted = {"reward": 4, "choices": 2, "flips": 0, "policy_kl": kl, "clipped": 1}
    assert sums.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, err_msg=name)


SCORES = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 2)), jnp.float32)
GAINS = np.random.default_rng(1).standard_normal((2, 2, 2, 2)).astype(np.float32)
"""[row, chunk, expert before, expert]: the choice of a chunk decides what the next one gains too."""
EVERY = np.array(list(itertools.product((0, 1), repeat=4)), np.int32).reshape(-1, 2, 2)
"""Experts of two chunks in two rows: all that can be drawn."""
PRICE = 0.7


def chosen(scores, experts):
    logs = jax.nn.log_softmax(scores)
    picked = jnp.take_along_axis(logs, experts[..., None], -1)[..., 0]
    return Choice(experts, picked, jnp.ones((2, 2), bool))


def gains_of(experts, coupled):
    before = np.stack([np.zeros(2, np.int32), experts[:, 0] * coupled], 1)
    return GAINS[np.arange(2)[:, None], np.arange(2)[None], before, experts]


def enumerated(config, coupled):
    """The gradient of the loss in expectation over all draws, and that of the expected reward with its flips."""
    gains = jnp.asarray(np.stack([gains_of(experts, coupled) for experts in EVERY]))
    flips = jnp.asarray((EVERY[..., 0] != EVERY[..., 1]).sum(1), jnp.float32)
    every, ids = jnp.asarray(EVERY), jnp.ones((2, 2), jnp.int32)

    def chance(scores, experts):
        return jnp.exp(jnp.sum(chosen(scores, experts).log_p))

    def loss(scores, experts, gain):
        made = chosen(scores, experts)
        return surrogate(config, [made], [made], gain, ids)[0]

    def expected(scores):
        chances = jax.vmap(lambda experts: chance(scores, experts))(every)
        return jnp.sum(chances * (gains.sum((1, 2)) - config.flip_price * flips))

    @jax.jit
    def gradients(scores):
        chances = jax.vmap(lambda experts: chance(scores, experts))(every)
        slopes = jax.vmap(lambda experts, gain: jax.grad(loss)(scores, experts, gain))(every, gains)
        return jnp.einsum("n,n...->...", chances, slopes), jax.grad(expected)(scores)

    return gradients(SCORES)


@pytest.mark.parametrize("method", ["reinforce", "ppo"])
def test_the_expected_gradient_is_the_gradient_of_the_expected_reward(method):
    """With discount 1, whatever choices do to later chunks; PPO's where the routers that drew are those that learn."""
    found, exact = enumerated(PolicyConfig(method, discount=1.0, flip_price=PRICE), True)
    np.testing.assert_allclose(found, -exact, rtol=1e-4, atol=1e-6)
    assert np.abs(exact).max() > 0.05


def test_credit_for_the_own_chunk_alone_is_exact_only_if_chunks_are_apart():
    found, exact = enumerated(PolicyConfig(discount=0.0), False)
    np.testing.assert_allclose(found, -exact, rtol=1e-4, atol=1e-6)
    found, exact = enumerated(PolicyConfig(discount=0.0), True)
    assert np.abs(found + exact).max() > 0.05


EXPERTS, WIDTH, CHUNK, STEPS, ROWS = 4, 6, 4, 120, 32
BANK = AdapterConfig(
    rank=EXPERTS,
    blocks=EXPERTS,
    router=RouterConfig(chunk=CHUNK, reads=(ChunkMean(),), hidden=8),
    code=(Draw(),),
)
CONTEXTS = np.random.default_rng(3).standard_normal((EXPERTS, WIDTH)).astype(np.float32)
PAYS = np.stack([np.roll(np.linspace(0, 1, EXPERTS, dtype=np.float32), i) for i in range(EXPERTS)])
"""[context, expert]: another expert pays 1 in each context, and one expert for all contexts pays 1/2."""


def contexts(key):
    """Rows of two chunks, the first of which tells the context, and the contexts."""
    which, noise = jax.random.split(key)
    context = jax.random.randint(which, (ROWS,), 0, EXPERTS)
    x = jnp.asarray(CONTEXTS)[context][:, None] + 0.3 * jax.random.normal(noise, (ROWS, 2 * CHUNK, WIDTH))
    return x, context


def make_bandit(method):
    """(sign of the reward) -> the mean pay of a router's likeliest experts after some steps, and each step's KL."""
    config, module = PolicyConfig(method), Router(BANK)
    optimizer = keep_routers(optax.adam(3e-2), config.refresh)
    ids = jnp.ones((ROWS, 2 * CHUNK), jnp.int32)

    def run(params, x, experts=None, **options):
        given = {} if experts is None else {POLICY: experts}
        return module.apply({"params": params["router"], **given}, x, **options)[1]

    def step(carried, key, sign):
        params, state = carried
        draw, see = jax.random.split(key)
        x, context = contexts(see)
        acting = acting_params(state, params, config.refresh)
        drawn = run(acting, x, rngs={POLICY: draw}, mutable=("intermediates", POLICY))
        pay = jnp.asarray(PAYS)[context[:, None], drawn[POLICY]["draw_0"]] / CHUNK
        gain = jnp.where(jnp.arange(2 * CHUNK)[None] >= CHUNK, sign * pay, 0.0)

        def loss(params):
            side = run(params, x, drawn[POLICY], mutable=("intermediates",))
            loss, sums = surrogate(config, choices(side), choices(drawn), gain, ids)
            return loss / ROWS, sums.get("policy_kl", 0.0) / sums["choices"]

        gradient, kl = jax.grad(loss, has_aux=True)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), kl

    def learned(sign):
        made = nn.meta.unbox(module.init(jax.random.key(0), contexts(jax.random.key(1))[0]))["params"]
        params = {"router": made}
        keys = jax.random.split(jax.random.key(2), STEPS)
        carried = params, optimizer.init(params)
        (params, _), kl = jax.lax.scan(lambda c, k: step(c, k, sign), carried, keys)
        x, context = contexts(jax.random.key(5))
        (likeliest,) = choices(run(params, x, mutable=("intermediates",)))
        return jnp.mean(jnp.asarray(PAYS)[context, likeliest.expert[:, -1]]), kl

    return jax.jit(learned)


@pytest.mark.slow(days=28, group="learning")
@pytest.mark.parametrize("method", ["reinforce", "ppo"])
def test_a_contextual_bandit_reaches_its_optimum(method):
    """The best expert of every context pays 1. Without a reward, or with its sign turned, nothing of it is learned.

    A router that learns is never further than 0.1 nats a choice from the one that draws.
    """
    learned = make_bandit(method)
    pay, kl = learned(1.0)
    assert pay >= 0.95
    assert kl.max() < 0.1
    assert (kl.max() > 0) == (method == "ppo")
    assert learned(0.0)[0] < 0.6
    assert learned(-1.0)[0] < 0.2
