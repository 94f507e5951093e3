"""Segments, time and order of a call's tokens, against a loop over them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import (
    AttentionConfig,
    GatedDeltaNetConfig,
    GatedRecurrenceConfig,
    GRUConfig,
    HyenaConfig,
    MixerConfig,
    StateEngineConfig,
    init_state,
)
from jaxblt.mixers.driver.base import Clock, arrange, last_run, restore, start_clock


def clock_of(time: list[int], position: list[int], last_segment: list[int]) -> Clock:
    time_, position_, last = (jnp.asarray(a, jnp.int32) for a in (time, position, last_segment))
    return Clock(time=time_, position=position_, last_segment=last)


def walk(ids: np.ndarray, time: int, last: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """(source index, run, time) of each token, one at a time, and the clock afterwards."""
    out, run = [], 0
    for t, s in enumerate(ids):
        if s == 0:
            continue
        if abs(s) != last:
            run, time, last = run + 1, 0, abs(int(s))
        out.append((t, run, time))
        time += 1
    return out, time, last


def test_tokens_are_numbered_as_a_loop_numbers_them() -> None:
    rng = np.random.default_rng(0)
    ids = np.where(
        rng.random((40, 9)) < 0.3, 0, rng.integers(1, 4, (40, 9)) * rng.choice([1, 1, -1], (40, 9))
    )
    clock = clock_of(*rng.integers(0, 5, (3, 40)).tolist())
    x = rng.standard_normal((40, 9, 2)).astype(np.float32)
    tokens, after = jax.jit(arrange)(jnp.asarray(x), jnp.asarray(ids, jnp.int32), None, clock)
    order, run, times, live, ends = jax.device_get(
        (tokens.order, tokens.run, tokens.time, tokens.live, last_run(tokens))
    )
    for row in range(40):
        expected, time, last = walk(ids[row], int(clock.time[row]), int(clock.last_segment[row]))
        count = len(expected)
        got = [order[row, :count], run[row, :count], times[row, :count]]
        np.testing.assert_array_equal(
            np.stack(got, 1).reshape(count, 3), np.asarray(expected).reshape(count, 3)
        )
        assert not np.any(live[row, count:])
        assert (int(after.time[row]), int(after.last_segment[row])) == (time, last)
        assert ends[row] == (expected[-1][1] if expected else 0)
    back = np.asarray(restore(tokens.x, tokens))
    np.testing.assert_array_equal(back, np.where((ids > 0)[..., None], x, 0))


def test_without_segment_ids_the_document_continues() -> None:
    clock = clock_of([4, 0], [7, 0], [3, 0])
    tokens, after = arrange(jnp.ones((2, 3, 1)), None, None, clock)
    np.testing.assert_array_equal(tokens.run, [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(tokens.time, [[4, 5, 6], [0, 1, 2]])
    np.testing.assert_array_equal(tokens.positions, [[7, 8, 9], [0, 1, 2]])
    np.testing.assert_array_equal(after.last_segment, [3, 1])


def test_given_positions_are_continued_from() -> None:
    positions = jnp.asarray([[100, 104, 110]], jnp.int32)
    ids = jnp.asarray([[1, 0, 1]], jnp.int32)
    tokens, clock = jax.jit(arrange)(jnp.ones((1, 3, 1)), ids, positions, start_clock(1))
    np.testing.assert_array_equal(np.asarray(tokens.positions)[:, :2], [[100, 110]])
    tokens, clock = jax.jit(arrange)(jnp.ones((1, 1, 1)), None, None, clock)
    assert (int(tokens.positions[0, 0]), int(tokens.time[0, 0]), int(clock.position[0])) == (111, 2, 112)


@pytest.mark.parametrize("config", [AttentionConfig(16), HyenaConfig(16), GatedRecurrenceConfig(16)])
def test_configs_keep_the_protocol(config: MixerConfig) -> None:
    assert isinstance(config, MixerConfig)
    assert hash(config) == hash(dataclasses.replace(config))  # type: ignore[type-var]


def test_rows_and_capacity_are_whole_numbers() -> None:
    with pytest.raises(
        ValueError, match=r"capacity must be at least 1, got 0: the most tokens of a document"
    ):
        init_state(AttentionConfig(16), 1, capacity=0)
    with pytest.raises(ValueError, match=r"capacity must be a whole number, got 2\.5"):
        init_state(AttentionConfig(16), 1, capacity=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be at least 0, got -1"):
        init_state(AttentionConfig(16), -1, capacity=1)


@pytest.mark.parametrize(
    "config",
    [
        GRUConfig(16, num_heads=2),
        GatedDeltaNetConfig(16, num_heads=2),
        StateEngineConfig(16, num_heads=2, cell="gru", state_attention=True),
    ],
)
def test_parameters_are_fp32_where_jax_counts_in_f64(config: MixerConfig) -> None:
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 8, 16), jnp.float32)
        made = jax.eval_shape(config.build().init, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}
