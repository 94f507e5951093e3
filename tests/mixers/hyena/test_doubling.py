"""Long filters token by token: blocks of doubling sizes are the whole convolution, at the cost that they promise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import ExplicitFilter, HyenaConfig, ImplicitFilter, init_state, prepare
from jaxblt.mixers.driver.prepared import COLLECTION, prepares
from jaxblt.mixers.hyena import doubling
from jaxblt.mixers.hyena.doubling import NEAR, Doubling, init_doubling
from jaxblt.models import StackConfig
from jaxblt.testing import check_mixer
from tests.parameters import drawn
from tests.tolerances import assert_close

LENGTH = 40
"""Turns of 16 tokens and a past of 48: blocks of 2, 4 and 8 tokens, and a turn that begins behind each other row's."""
STREAMED = ("chunked", "documents_streamed", "holes_streamed", "rows_advance_alone", "state")


@pytest.fixture
def small_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr(doubling, "NEAR", 2)


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_doubling")
@pytest.mark.usefixtures("small_blocks")
def test_blocks_of_all_sizes_pass_the_mixers_suite() -> None:
    """Documents, holes and rows that advance alone meet every block; calls of 7 tokens come between those of one."""
    check_mixer(HyenaConfig(dim=2, filter=ExplicitFilter(513)), only=STREAMED, length=LENGTH)


@pytest.mark.slow(days=28, group="costly", turn="mixers/hyena/test_doubling")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("dtype", "late"), [(jnp.float32, (3, 19)), (jnp.bfloat16, (4, 4))])
def test_a_filter_shorter_than_the_stream(dtype: Any, late: tuple[int, int]) -> None:
    """Many turns, in rows that stand at different tokens of them; a state keeps its dtypes."""
    size, tokens = 21, 64
    draw = np.random.default_rng(0).standard_normal
    u, taps = draw((2, 3, tokens)), draw((3, size + 1))
    core = Doubling(jnp.asarray(taps, jnp.float32), jnp.ones(3))
    step = jax.jit(core.next)
    first = init_doubling(2, 3, size, dtype)
    given, state, found = jnp.asarray(u, dtype), first, np.zeros(u.shape)
    for t in range(tokens + max(late)):
        at = [t - begin for begin in late]
        live = np.array([0 <= i < tokens for i in at])
        column = given[np.arange(2), :, np.clip(at, 0, tokens - 1)][..., None]
        y, state = step(column, jnp.asarray(live[:, None], jnp.int32), state)
        for row in np.flatnonzero(live):
            found[row, :, at[row]] = np.asarray(y[row, :, 0], np.float64)
    wide = np.asarray(given, np.float64)
    want = np.stack([[np.convolve(x, h)[:tokens] for x, h in zip(r, taps, strict=True)] for r in wide]) + wide
    assert_close(found, want, dtype, n=size)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), first
    )


def mean_flops(size: int) -> float:
    """Count FLOPs of a token and channel in the mean of a turn: parts of `Doubling`, by how often they run."""
    core, state = Doubling(jnp.ones((1, size + 1)), jnp.ones(1)), init_doubling(1, 1, size, jnp.float32)
    due = jnp.ones(1, bool)

    def flops(part: Callable[..., Any]) -> float:
        return jax.jit(part).lower(core, state).compile().cost_analysis()["flops"]

    total = flops(lambda core, state: core.near(state))
    total += flops(lambda core, state: core.begin_turn(due, state)) / state.turn
    block = NEAR
    while block < state.turn:
        total += flops(lambda core, state, block=block: core.join(block, due, state)) / (2 * block)
        block *= 2
    return total


@pytest.mark.slow(days=28, group="costly")
def test_a_token_after_32_times_as_many_costs_less_than_four_times_as_much() -> None:
    """One product with all taps costs 32 times as much: 2 FLOP a tap."""
    short, long = mean_flops(255), mean_flops(8191)
    assert long < 4 * short
    assert long < 2 * 8192 / 4


def one_token(module: Any, state: Any, variables: Any) -> Any:
    x = jnp.ones((1, 1, module.config.dim))
    return jax.jit(lambda v, x, s: module.apply(v, x, state=s)).lower(variables, x, state).compile()


def test_prepared_taps_are_not_made_again() -> None:
    """The same bits; the network of the taps, 1,000 of which cost more than the token, is gone."""
    config = HyenaConfig(dim=2, filter=ImplicitFilter(1000, width=16))
    module, state = config.build(), init_state(config, 1, capacity=1000)
    x = jnp.ones((1, 1, 2))
    params = drawn(module, x)
    variables = prepare(module.apply, params, x, state=state)
    taps = variables[COLLECTION]["long_0"]["taps"]
    assert (taps.shape, taps.dtype) == ((2, 1000), jnp.float32)
    made, given = one_token(module, state, params), one_token(module, state, variables)
    network = 2 * 1000 * 16 * (3 + 16 + 16)
    assert made.cost_analysis()["flops"] - given.cost_analysis()["flops"] > network
    assert "sine" in made.as_text()
    assert "sine" not in given.as_text()
    results = (given(variables, x, state), made(params, x, state))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    with pytest.raises(
        ValueError, match=r"1000 taps were prepared and the state needs 193: prepare with a state of"
    ):
        jax.eval_shape(module.apply, variables, x, state=init_state(config, 1, capacity=150))


def test_who_asks_for_preparation() -> None:
    """Whatever holds an implicit filter, at any depth; a mixer without one adds nothing."""
    implicit, explicit = (
        HyenaConfig(dim=2, filter=filter) for filter in (ImplicitFilter(4), ExplicitFilter(4))
    )
    assert prepares(StackConfig(pattern="H", mixers={"H": implicit}))
    assert not prepares(StackConfig(pattern="H", mixers={"H": explicit}))
    x = jnp.ones((1, 1, 2))
    params = drawn(explicit.build(), x)
    assert (
        prepare(explicit.build().apply, params, x, state=init_state(explicit, 1, capacity=9)).keys()
        == params.keys()
    )
