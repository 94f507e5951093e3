"""What is checked of routers and has no module of its own: several levels in one program, remat, codes known ahead."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import RECIPES
from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig, Traces, attach
from jaxblt.adapters.code.router import Router, init_router_state
from jaxblt.adapters.update.params import routers
from jaxblt.training.flops import count_params
from tests.adapters.routing import DOCUMENTS, inputs, params_of, whole

CHUNK, LEVELS = 5, ("chunk", "prefix", "token")
ROUTER = RouterConfig(level="chunk", chunk=CHUNK, reads=(ChunkMean(), Prefix(3)), hidden=4)
ADAPTER = AdapterConfig(rank=3, router=ROUTER)
ROW = np.ones((1, 30), np.int32)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_router_checks")
def test_levels_in_one_program_are_those_of_a_program_each():
    several = dataclasses.replace(ADAPTER, levels=(("a", "token"), ("b", "prefix")))
    alone = {
        level: dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, level=level))
        for level in LEVELS
    }
    params, x, ids = {level: params_of(alone[level]) for level in LEVELS}, inputs(), DOCUMENTS
    module = several.build()
    code, state = jax.jit(module.apply)({"params": params}, jnp.asarray(x), segment_ids=jnp.asarray(ids))
    assert state is None
    expected = np.concatenate([whole(alone[level], params[level], x, ids) for level in LEVELS], -1)
    np.testing.assert_allclose(code, expected, atol=1e-6)
    assert [part.shape[-1] for part in several.split(code)] == [3, 3, 3]


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_router_checks")
def test_a_router_under_remat_has_the_same_gradients_and_keeps_less():
    config = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, level="token", hidden=64))
    params, x = params_of(config), jnp.asarray(inputs())
    ids = jnp.asarray(DOCUMENTS)

    def code(params, x):
        return Router(config).apply({"params": params}, x, segment_ids=ids)[0]

    def kept(f):
        """Bytes of what the backward pass reads, inputs left out."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(f, p, x)[1], params, x))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) - given

    given = sum(leaf.nbytes for leaf in jax.tree.leaves((params, x)))
    assert kept(jax.checkpoint(code)) < 0.1 * kept(code)
    plain, again = (
        jax.jit(jax.grad(lambda p, x, f=f: jnp.sum(jnp.square(f(p, x))), (0, 1)))(params, x)
        for f in (code, jax.checkpoint(code))
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), again, plain)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_router_checks")
@pytest.mark.parametrize("lag", [1, 2])
def test_a_code_is_known_lag_chunks_before_it_begins(lag):
    """With lag 2 the code of a chunk does not wait for the chunk before it, and nothing has to be speculated."""
    config = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, lag=lag))
    params, x = params_of(config), inputs()[:1, :30]
    changed = x.copy()
    changed[:, 15:20] += 1
    code, other = (whole(config, params, each, ROW) for each in (x, changed))
    moved = np.abs(other - code).max((0, 2)) > 1e-3
    first = 15 + lag * CHUNK
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(first, first + CHUNK))


@pytest.mark.parametrize(
    ("change", "held"),
    [
        ({"chunk": 4}, "chunk = 4"),
        ({"reads": (ChunkMean(), Prefix(4))}, "steps = 4"),
        ({"level": "token"}, "level = token"),
    ],
)
def test_the_sums_of_another_config_are_refused(change, held):
    """Their shapes may be the same."""
    other = dataclasses.replace(ADAPTER, router=dataclasses.replace(ROUTER, **change))
    x, state = jnp.asarray(inputs()), init_router_state(other, 2, inputs().shape[-1])
    with pytest.raises(
        ValueError, match=f"the state is of {held}, and the config of .*: make it by init_state"
    ):
        jax.eval_shape(lambda: Router(ADAPTER).init_with_output(jax.random.key(0), x, state=state))


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_router_checks")
@pytest.mark.parametrize("read", [Prefix(128), Traces()])
def test_routers_of_a_recipe_are_small(read):
    """They have less than 5 % of all parameters, beside a bank of eight domains at rank 4."""
    router = RouterConfig(level="token", chunk=64, reads=(ChunkMean(), read), hidden=48)
    adapter = AdapterConfig(sites=("mixer/*", "mlp/*"), rank=32, router=router)
    module = attach(RECIPES["books_512"]().model, adapter).build()
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    own, every = count_params(routers(params))[0], count_params(params)[0]
    assert 0 < own < 0.05 * every
