"""What the cache holds after tokens, documents, holes and overflow."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, check_capacity, init_state
from jaxblt.mixers.attention.kv_cache import AttentionState, Cache, emptied, entries, put
from jaxblt.mixers.driver.base import arrange

CONFIG = AttentionConfig(dim=4, num_heads=1)


def fed(state: AttentionState, segment_ids: list[list[int]], first: float = 0.0) -> AttentionState:
    """The state after tokens whose keys are numbered from `first`."""
    return feed(state, jnp.asarray(segment_ids, jnp.int32), first)


@jax.jit
def feed(state: AttentionState, ids: jax.Array, first: float) -> AttentionState:
    x = first + jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.float32)[None, :, None], (*ids.shape, 4))
    tokens, clock = arrange(x, ids, None, state.clock)
    heads = tokens.x[:, :, None]
    new, fresh = entries(heads, -heads, tokens, state.times.shape[1])
    cache = put(emptied(Cache(state.k, state.v, state.times), fresh), new)
    return dataclasses.replace(state, clock=clock, **cache._asdict())


def held(state: AttentionState) -> list[list[tuple[int, int]]]:
    """(time, key) in each row's slots, oldest first."""
    rows = []
    for times, keys in zip(np.asarray(state.times), np.asarray(state.k[:, :, 0, 0]), strict=True):
        rows.append(sorted((int(t), int(k)) for t, k in zip(times, keys, strict=True) if t >= 0))
    return rows


@pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_kv_cache")
def test_a_window_keeps_the_last_tokens() -> None:
    state = init_state(AttentionConfig(dim=4, num_heads=1, window=3), 2, capacity=64)
    assert state.k.shape == (2, 3, 1, 4)
    state = fed(state, [[1, 1, 1, 1, 1], [1, 0, 1, 0, 0]])
    assert held(state) == [[(2, 2), (3, 3), (4, 4)], [(0, 0), (1, 2)]]
    state = fed(state, [[1], [1]], first=10)
    assert held(state) == [[(3, 3), (4, 4), (5, 10)], [(0, 0), (1, 2), (2, 10)]]
    np.testing.assert_array_equal(state.v, -state.k)


@pytest.mark.slow(days=28, group="costly", turn="mixers/attention/test_kv_cache")
def test_a_new_document_empties_the_cache() -> None:
    state = fed(init_state(CONFIG, 2, capacity=6), [[1, 1, 1], [1, 1, 1]])
    state = fed(state, [[1, 2, 2], [0, 0, 1]], first=10)
    assert held(state) == [[(0, 11), (1, 12)], [(0, 0), (1, 1), (2, 2), (3, 12)]]


def test_holes_count_as_time_and_are_not_held() -> None:
    state = fed(init_state(CONFIG, 1, capacity=6), [[1, -1, 1, -1]])
    assert held(state) == [[(0, 0), (2, 2)]]
    np.testing.assert_array_equal(state.clock.time, [4])


def test_overflow_is_an_error_on_the_host() -> None:
    state = fed(init_state(CONFIG, 2, capacity=4), [[1, 1, 1, 0], [1, 1, 1, 1]])
    check_capacity({"layers": [state]})
    with pytest.raises(ValueError, match=r"row 1 is at position 4 .* AttentionState holds 4: .*capacity=5"):
        check_capacity({"layers": [state]}, more=1)
    with pytest.raises(ValueError, match="row 1 is at position 5"):
        check_capacity(fed(state, [[1], [1]]))


def test_a_ring_never_overflows() -> None:
    state = init_state(AttentionConfig(dim=4, num_heads=1, window=2), 1, capacity=4)
    for _ in range(3):
        state = fed(state, [[1, 1, 1]])
    check_capacity(state, more=100)


def test_a_window_beyond_the_capacity_is_bounded_by_it() -> None:
    state = init_state(AttentionConfig(dim=4, num_heads=1, window=9), 1, capacity=4)
    assert state.k.shape[1] == 4
    with pytest.raises(ValueError, match="holds 4"):
        check_capacity(state, more=5)
