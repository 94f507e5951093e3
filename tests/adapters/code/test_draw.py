"""A policy over a bank's experts: what is drawn, where it holds, and what its gradients are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Draw, Prefix, RouterConfig, TopK
from jaxblt.adapters.code.draw import POLICY, choices
from jaxblt.adapters.code.router import SHARES, Router, init_router_state
from tests.adapters.routing import DOCUMENTS, inputs, params_of, with_holes

EXPERTS, CHUNK = 3, 5
BANK = AdapterConfig(
    rank=6,
    blocks=EXPERTS,
    router=RouterConfig(chunk=CHUNK, reads=(ChunkMean(), Prefix(3)), hidden=4),
    code=(Draw(),),
)
KEYS = jax.random.split(jax.random.key(0), 400)
IDS = with_holes(DOCUMENTS)


@pytest.fixture(scope="module")
def params():
    return params_of(BANK)


def passed(params, experts=None, mutable=("intermediates", POLICY), **options):
    given = {} if experts is None else {POLICY: experts}
    apply = Router(BANK).apply
    return apply(
        {"params": params, **given},
        jnp.asarray(inputs()),
        segment_ids=jnp.asarray(IDS),
        mutable=mutable,
        **options,
    )


@pytest.fixture(scope="module")
def drawn(params):
    """Codes, choices and shares of many draws."""

    def one(key):
        (code, _), side = passed(params, rngs={POLICY: key})
        return code, choices(side)[0], side["intermediates"][SHARES][0], side[POLICY]

    code, choice, shares, experts = jax.jit(jax.vmap(one))(KEYS)
    return np.asarray(code), jax.tree.map(np.asarray, choice), np.asarray(shares[0]), experts


def chunks():
    """The number of each token's chunk in its row, -1 before a document's first code and at padding."""
    found = np.full(DOCUMENTS.shape, -1)
    for row, ids in enumerate(DOCUMENTS):
        for document in np.unique(ids[ids > 0]):
            places = np.flatnonzero(ids == document)
            time = np.arange(len(places)) // CHUNK
            found[row, places] = np.where(time >= 1, document * 100 + time, -1)
    return found


def test_an_expert_is_drawn_a_chunk_and_holds(drawn):
    code, choice, _, _ = drawn
    of = chunks()
    told = (of >= 0) & (IDS > 0)
    np.testing.assert_array_equal(code[:, told].max(-1), 1)
    np.testing.assert_array_equal(code[:, told].argmax(-1), choice.expert[:, told])
    assert (choice.expert[:, (of < 0) & (DOCUMENTS > 0)] == -1).all()
    for row in range(len(of)):
        for chunk in np.unique(of[row][of[row] >= 0]):
            inside = choice.expert[:, row, of[row] == chunk]
            assert (inside == inside[:, :1]).all()
    starts = choice.starts[0] & (DOCUMENTS > 0)
    first = (of >= 0) & (of != np.pad(of, ((0, 0), (1, 0)))[:, :-1])
    np.testing.assert_array_equal(starts, first)


def test_shares_of_draws_are_those_of_the_router(drawn):
    """Of 400 draws, within 5 standard deviations; log-probabilities are those of what was drawn."""
    _, choice, shares, _ = drawn
    places = np.argwhere(choice.starts[0] & (IDS > 0))
    for row, t in places:
        p = shares[row, t]
        found = np.bincount(choice.expert[:, row, t], minlength=EXPERTS) / len(KEYS)
        assert (np.abs(found - p) < 5 * np.sqrt(p * (1 - p) / len(KEYS)) + 1e-6).all()
        np.testing.assert_allclose(choice.log_p[:, row, t], np.log(p)[choice.expert[:, row, t]], rtol=1e-5)
    assert max(shares[row, t].min() for row, t in places) > 0.02


@pytest.mark.slow(days=28, group="costly")
def test_experts_that_were_drawn_are_taken_and_the_likeliest_else(drawn, params):
    code, choice, shares, experts = drawn
    experts = jax.tree.map(lambda x: x[7], experts)
    (again, _), side = jax.jit(lambda p: passed(p, experts, mutable=("intermediates",)))(params)
    np.testing.assert_array_equal(again, code[7])
    np.testing.assert_array_equal(choices(side)[0].expert, choice.expert[7])
    (likeliest, _), _ = jax.jit(passed)(params)
    told = (chunks() >= 0) & (IDS > 0)
    np.testing.assert_array_equal(np.asarray(likeliest)[told].argmax(-1), shares[told].argmax(-1))


@pytest.mark.slow(days=28, group="costly")
def test_numbers_that_do_not_sum_to_one_are_shares_of_their_sum(params):
    config = dataclasses.replace(BANK, code=(TopK(2), Draw()))
    given = {"segment_ids": jnp.asarray(IDS), "mutable": ("intermediates",)}
    apply = jax.jit(lambda p: Router(config).apply({"params": p}, jnp.asarray(inputs()), **given)[1])
    side = apply(params)
    (choice,), shares = choices(side), np.sort(side["intermediates"][SHARES][0], -1)
    told = np.asarray(choice.starts) & (IDS > 0)
    wanted = np.log(shares[..., 2] / (shares[..., 1] + shares[..., 2]))[told]
    np.testing.assert_allclose(choice.log_p[told], wanted, rtol=1e-5, atol=1e-6)
    assert wanted.min() < -0.1


@pytest.mark.slow(days=28, group="costly")
def test_gradients_of_the_code_are_straight_through(params):
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((*DOCUMENTS.shape, EXPERTS)), jnp.float32)

    def slope(config):
        def total(params):
            code = Router(config).apply(
                {"params": params}, jnp.asarray(inputs()), segment_ids=jnp.asarray(IDS)
            )[0]
            return jnp.sum(code * weights)

        return jax.jit(jax.grad(total))(params)

    hard, soft = slope(BANK), slope(dataclasses.replace(BANK, code=()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), hard, soft)
    assert np.abs(hard["code"]["kernel"]).max() > 0.01


def test_what_is_refused(params):
    state = init_router_state(BANK, len(IDS), inputs().shape[-1])
    with pytest.raises(ValueError, match="draws experts of whole rows, and the call has a state"):
        jax.eval_shape(lambda p: passed(p, state=state, rngs={POLICY: jax.random.key(0)}), params)
