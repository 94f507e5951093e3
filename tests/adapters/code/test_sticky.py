"""Hysteresis of a bank's choice, and numbers that are cut to zero."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Ema, Prefix, RouterConfig, Sparse, Sticky
from jaxblt.adapters.code.router import Router
from jaxblt.adapters.code.sticky import Switches
from jaxblt.mixers.driver.marks import mark
from tests.adapters.routing import DOCUMENTS, TURNS, in_calls, inputs, params_of, whole, with_holes

ROUTER = RouterConfig(level="token", chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4)
BANK = AdapterConfig(rank=8, blocks=4, router=ROUTER)
CHUNKED = dataclasses.replace(BANK, router=dataclasses.replace(ROUTER, level="chunk"))


def sticky(tau, bank=BANK, *before):
    return dataclasses.replace(bank, code=(*before, Sticky(tau)))


def loop(scores, ids, tau):
    """The choices, token by token; -1 at holes and padding."""
    chosen = np.full(ids.shape, -1)
    for row in range(len(ids)):
        expert, document = None, 0
        for t, s in enumerate(ids[row]):
            if s and abs(s) != document:
                expert, document = None, abs(s)
            if s > 0:
                best = int(np.argmax(scores[row, t]))
                if expert is None or scores[row, t, best] > scores[row, t, expert] + np.float32(tau):
                    expert = best
                chosen[row, t] = expert
    return chosen


def flips(chosen, ids):
    return sum(
        int(np.count_nonzero(np.diff(chosen[row][ids[row] == s])))
        for row in range(len(ids))
        for s in np.unique(ids[row][ids[row] > 0])
    )


@pytest.mark.slow(days=28, group="costly")
def test_sticky_is_the_loop_over_tokens_and_flips_fall_with_tau():
    ids, rng = with_holes(DOCUMENTS), np.random.default_rng(2)
    scores = rng.dirichlet(np.full(4, 0.7), ids.shape).astype(np.float32)
    given = jnp.asarray(scores), jnp.asarray(ids > 0)[..., None]
    counts = []
    for tau in (0.0, 0.3, 0.6):
        run = jax.jit(lambda streams, ids, tau=tau: Switches(tau).run(streams, mark(ids), None)[0])
        chosen = np.where(ids > 0, run(given, jnp.asarray(ids)), -1)
        np.testing.assert_array_equal(chosen, loop(scores, ids, tau))
        counts.append(flips(chosen, ids))
    assert counts[0] > counts[1] > counts[2]


@pytest.mark.slow(days=28, group="costly", turn="adapters/code/test_sticky")
@pytest.mark.parametrize("bank", [BANK, pytest.param(CHUNKED, marks=TURNS)], ids=["token", "chunk"])
def test_choices_are_the_same_in_any_split(bank):
    params, ids = params_of(bank), with_holes(DOCUMENTS)
    config = sticky(0.2, bank, Ema(0.5))
    code = whole(config, params, inputs(), ids)
    if bank is BANK:  # from its first code on a document has one expert; before it, an even share
        np.testing.assert_array_equal(code.max(-1), (ids > 0).astype(np.float32))
    else:
        assert {*np.unique(code)} == {0.0, 0.25, 1.0}
    np.testing.assert_array_equal(in_calls(config, params, inputs(), ids), code)


def test_tables_of_stretches_join_to_that_of_the_whole():
    """Stretches of 13 tokens begin inside documents, as the shards of a row do."""
    ids = jnp.asarray(with_holes(DOCUMENTS)[:, :39])
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.random((*ids.shape, 3)).astype(np.float32))
    changes = jnp.asarray(rng.random((*ids.shape, 1)) < 0.6)
    core = Switches(0.2)
    run = jax.jit(lambda s, c, ids, past, carry: core.run((s, c), mark(ids, past), carry))
    chosen, table = run(scores, changes, ids, jnp.zeros(2, jnp.int32), None)
    carry, past = core.zero((scores,)), jnp.zeros(2, jnp.int32)
    for at in (0, 13, 26):
        part = slice(at, at + 13)
        own = (scores[:, part], changes[:, part], ids[:, part])
        found, _ = run(*own, past, carry)
        np.testing.assert_array_equal(found, chosen[:, part])
        carry = core.join(carry, run(*own, past, None)[1])
        live = np.abs(np.asarray(ids[:, : at + 13]))
        past = jnp.asarray([row[row > 0][-1] for row in live], jnp.int32)
    np.testing.assert_array_equal(carry, core.join(core.zero((scores,)), table))
    np.testing.assert_array_equal(carry, chosen[:, -1])


@TURNS
def test_the_first_code_is_straight_through_too():
    """Of a row's only code, the gradient of each number is that of the code before the choice."""
    config = sticky(0.2)
    x, ids = jnp.asarray(inputs()[:, :1]), jnp.ones((2, 1), jnp.int32)
    weights = jnp.asarray([1.0, -2.0, 0.5, 3.0])[None, None]

    def gradient(config):
        def total(params):
            code = Router(config).apply({"params": params}, x, segment_ids=ids)[0]  # type: ignore[index]
            return jnp.sum(code * weights)

        return jax.jit(jax.grad(total))(params_of(BANK))

    hard, soft = gradient(config), gradient(BANK)
    jax.tree.map(np.testing.assert_array_equal, hard, soft)
    assert np.abs(hard["code"]["kernel"]).max() > 0


def test_sparse_cuts_small_numbers_and_leaves_others():
    code = jnp.asarray([[[0.5, -0.25, 0.25, -0.75], [0.125, 0.0, -0.5, 3.0]]])
    found, state = Sparse(0.25).apply(Router(BANK), "", code, None, None, ())
    np.testing.assert_array_equal(found, [[[0.5, -0.25, 0.25, -0.75], [0.0, 0.0, -0.5, 3.0]]])
    assert state == ()
