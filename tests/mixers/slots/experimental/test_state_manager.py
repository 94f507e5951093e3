"""Housekeeping of slots: a dead one is pruned and begun anew, the others stay; stored states as codes."""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import GRUConfig, StateEngineConfig, init_state
from jaxblt.mixers.slots.experimental.state_compressor import StateCompressor
from jaxblt.mixers.slots.experimental.state_manager import StateManager
from jaxblt.mixers.slots.experimental.state_pruning import begin_anew, clear, prune
from jaxblt.mixers.slots.state_slots import Slots
from jaxblt.side_outputs import SIDE_OUTPUTS
from tests.parameters import drawn

CONFIG = StateEngineConfig(dim=6, num_heads=2, head_dim=3, num_slots=4, chunk_size=8)
DEAD = np.zeros((2, 4), bool)
DEAD[0, 1] = True


def only_dead_changed(before: Any, after: Any) -> bool:
    """Whether arrays [..., H, S] differ at the dead slot, and are equal bit by bit elsewhere."""
    before, after = np.asarray(before), np.asarray(after)
    np.testing.assert_array_equal(before[..., ~DEAD], after[..., ~DEAD])
    return bool(np.all(before[..., DEAD] != after[..., DEAD]))


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/experimental/test_state_manager")
def test_a_planted_dead_slot_is_pruned_and_begun_anew() -> None:
    x, module, manager = jax.random.normal(jax.random.key(0), (2, 16, 6)), CONFIG.build(), StateManager()
    params = jax.jit(module.init)(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda box: box.unbox(), params, is_leaf=lambda p: hasattr(p, "unbox"))
    planted = params | {"read_bias": jnp.where(DEAD, -9.0, 0.0)}

    @jax.jit
    def read_mass(params: Any) -> Any:
        _, side = module.apply({"params": params}, x, mutable=SIDE_OUTPUTS)
        return side["metrics"]["state_read_mass"][0].value.reshape(2, 4)

    importance = None
    for _ in range(3):
        importance = manager.update(importance, read_mass(planted))
    assert importance is not None
    np.testing.assert_array_equal(manager.dead(importance), DEAD)
    pruned = prune(planted, manager.dead(importance))
    assert only_dead_changed(planted["read_bias"], pruned["read_bias"])
    assert only_dead_changed(planted["route"]["bias"], pruned["route"]["bias"])
    mass = np.asarray(read_mass(pruned))
    assert np.all((mass == 0) == DEAD)
    fresh = begin_anew(pruned, jnp.asarray(DEAD), jax.random.key(2))
    assert only_dead_changed(pruned["route"]["kernel"], fresh["route"]["kernel"])
    assert np.all(np.asarray(read_mass(fresh)) > 0.1)


@pytest.mark.slow(days=28, group="costly")
def test_routes_begun_anew_are_as_wide_as_those_of_the_start() -> None:
    config = dataclasses.replace(CONFIG, dim=64, num_slots=16)
    params = nn.meta.unbox(jax.jit(config.build().init)(jax.random.key(1), jnp.zeros((1, 8, 64))))["params"]
    fresh = begin_anew(params, jnp.ones((2, 16), bool), jax.random.key(2))
    before, after = (np.std(p["route"]["kernel"]) for p in (params, fresh))
    assert 0.9 < after / before < 1.1


def test_importance_forgets() -> None:
    manager = StateManager(decay=0.75)
    start = manager.update(None, jnp.asarray([[0.75, 0.25]]))
    np.testing.assert_allclose(start, [[1.5, 0.5]])
    np.testing.assert_allclose(manager.update(start, jnp.asarray([[0.25, 0.75]])), [[1.25, 0.75]])


def test_a_read_mass_that_is_not_finite_leaves_the_importance() -> None:
    manager, mass = StateManager(), jnp.array([[0.5, 0.5], [1.0, jnp.nan]])
    before = jnp.array([[1.5, 0.5], [0.5, 1.5]])
    after = manager.update(before, mass)
    assert jnp.isfinite(after).all()
    assert (after[1, 1], after[0, 0] < before[0, 0]) == (1.5, True)
    assert jnp.array_equal(manager.update(None, mass), jnp.array([[1.0, 1.0], [2.0, 1.0]]))


def test_a_head_without_an_open_slot_is_refused() -> None:
    """A softmax over slots that are all closed would be that of before."""
    with pytest.raises(ValueError, match="dead has all slots of a head: leave one open"):
        prune(PARAMS, jnp.asarray(DEAD).at[1].set(True))


def test_dead_slots_of_a_state_are_emptied() -> None:
    state = init_state(dataclasses.replace(CONFIG, cell="lstm"), 2, capacity=1)
    state = jax.tree.map(lambda a: jnp.ones_like(a), state)
    cleared = clear(state, jnp.asarray(DEAD))
    assert only_dead_changed(jnp.moveaxis(state.slots.keys, 2, 0), jnp.moveaxis(cleared.slots.keys, 2, 0))
    for old, new in (
        (state.slots.values, cleared.slots.values),
        (state.engine.edge, cleared.engine.edge),
        (state.engine.cell, cleared.engine.cell),
    ):
        assert only_dead_changed(jnp.moveaxis(old, 3, 0), jnp.moveaxis(new, 3, 0))
    plain = clear(dataclasses.replace(state, engine=state.slots), jnp.asarray(DEAD))
    assert isinstance(plain.engine, Slots)
    np.testing.assert_array_equal(plain.slots.values, cleared.slots.values)


def test_codes_stand_for_states_and_the_encoder_learns_through_them() -> None:
    compressor = StateCompressor(dim=8, code_dim=4, codes=16)
    states = jax.random.normal(jax.random.key(0), (3, 5, 8))
    params = drawn(compressor, states)["params"]
    apply = jax.jit(partial(compressor.apply, mutable=SIDE_OUTPUTS))
    (decoded, codes), side = apply({"params": params}, states)
    x, decoded = np.asarray(states), np.asarray(decoded)
    z = x @ np.asarray(params["encoder"]["kernel"])
    apart = np.linalg.norm(z[..., None, :] - np.asarray(params["book"]), axis=-1)
    np.testing.assert_array_equal(codes, apart.argmin(-1))
    again = jax.jit(partial(compressor.apply, method="decode"))({"params": params}, codes)
    np.testing.assert_allclose(again, decoded, rtol=1e-5, atol=1e-6)
    nearest = apart.min(-1) ** 2 / 4
    loss = np.mean((x - decoded) ** 2) + 1.25 * nearest.mean()
    assert float(side["losses"]["state_compressor"][0]) == pytest.approx(float(loss), rel=1e-5)
    assert 1 <= float(side["metrics"]["state_compressor"][0].value) <= len(np.unique(codes)) + 1e-3

    def through(params: Any) -> Any:
        return jnp.sum(compressor.apply({"params": params}, states)[0][0])

    straight = jax.jit(jax.grad(through))(params)["encoder"]["kernel"]
    expected = np.einsum("td,e->de", x[0], np.asarray(params["decoder"]["kernel"]).sum(1))
    np.testing.assert_allclose(straight, expected, rtol=1e-4, atol=1e-5)


def test_codes_out_of_the_book_are_refused() -> None:
    compressor = StateCompressor(dim=4, codes=3)
    variables = drawn(compressor, jnp.zeros((1, 4)))
    for codes, said in (
        (jnp.array([0, 3]), r"codes must lie in 0\.\.2, got 0\.\.3: `encode` makes them"),
        (jnp.array([-1]), r"got -1\.\.-1"),
        ([0], "codes must be an integer array, got list"),
    ):
        with pytest.raises(ValueError, match=said):
            compressor.apply(variables, codes, method="decode")


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codes must be at least 1, got 0"):
        StateCompressor(dim=4, codes=0).init(jax.random.key(0), jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"dim=4\) got states of shape \(1, 5\): set dim=5"):
        StateCompressor(dim=4).init(jax.random.key(0), jnp.zeros((1, 5)))
    with pytest.raises(ValueError, match=r"commitment must be .*at least 0, got -1"):
        StateCompressor(dim=4, commitment=-1.0).init(jax.random.key(0), jnp.zeros((1, 4)))


PARAMS = {
    "route": {"kernel": jnp.zeros((6, 2, 4)), "bias": jnp.zeros((2, 4))},
    "read_bias": jnp.zeros((2, 4)),
}


def test_an_importance_is_no_mask_of_dead_slots() -> None:
    """As booleans all of its slots would be dead."""
    said = r"dead must be a mask of bool \(2, 4\), heads and slots last, got "
    state = init_state(CONFIG, 2, capacity=1)
    for wrong, got in (
        (jnp.ones((2, 4)), r"float32 \(2, 4\)"),
        (DEAD[:, :3], r"bool \(2, 3\)"),
        (DEAD[0], "bool"),
    ):
        for act in (
            lambda dead: prune(PARAMS, dead),
            lambda dead: begin_anew(PARAMS, dead, jax.random.key(0)),
            lambda dead: clear(state, dead),
        ):
            with pytest.raises(ValueError, match=said + got):
                act(jnp.asarray(wrong))
            with pytest.raises(ValueError, match=said + r"list \(2, 4\)"):
                act(DEAD.tolist())


def test_what_is_of_another_mixer_is_refused() -> None:
    with pytest.raises(
        ValueError, match="parameters of one StateEngine, got those of layers_0: name the mixer's"
    ):
        prune({"layers_0": PARAMS}, jnp.asarray(DEAD))
    with pytest.raises(ValueError, match="expected the state of a StateEngine, got a GRUState"):
        clear(init_state(GRUConfig(dim=6, num_heads=2), 2, capacity=1), jnp.asarray(DEAD))


def test_the_metric_of_a_layer_is_reshaped_first() -> None:
    manager = StateManager()
    with pytest.raises(
        ValueError, match=r"must have shape \[..., heads, slots\], got \(8,\): reshape the metric"
    ):
        manager.update(None, jnp.full((8,), 1 / 8))
    with pytest.raises(ValueError, match=r"must have shape \(2, 4\), got \(2, 3\)"):
        manager.update(jnp.ones((2, 4)), jnp.full((2, 3), 1 / 6))
