"""Segments, time, order, marks and last inputs of a call's tokens, against a loop over them."""

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
from jaxblt.mixers.driver.history import joined, recent
from jaxblt.mixers.driver.marks import mark


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


IDS = np.array([[0, 0, 2, 2, -2], [1, -1, 2, 0, 0], [-3, 3, 3, 0, 0], [0, 0, 0, 0, 0]], np.int32)
PAST = np.array([1, 1, 4, 1], np.int32)


def test_rows_begin_take_and_end_at_their_first_and_last_token_or_hole() -> None:
    marks = jax.jit(mark)(jnp.asarray(IDS), jnp.asarray(PAST))
    np.testing.assert_array_equal(
        marks.new, [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    )
    np.testing.assert_array_equal(marks.begins, [1, 0, 1, 0])
    np.testing.assert_array_equal(marks.takes, [1, 1, 1, 0])
    np.testing.assert_array_equal(marks.stays, [0, 0, 0, 1])
    np.testing.assert_array_equal(marks.end, [5, 3, 3, 0])


def test_factors_are_one_without_a_token_and_zero_where_a_document_begins() -> None:
    marks = jax.jit(mark)(jnp.asarray(IDS), jnp.asarray(PAST))
    half = jnp.full(IDS.shape, 0.5)
    found = np.asarray(jax.jit(marks.resets)(half))
    expected = [[1, 1, 0, 0.5, 1], [0.5, 1, 0, 1, 1], [0, 0.5, 0.5, 1, 1], [1] * 5]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(marks.inputs(half), np.where(IDS > 0, 0.5, 0))


BEFORE = np.array([[[7, 8, 9]]], np.float32)
"""The last inputs of document 1, which goes on or ends."""


@jax.jit
def behind(inputs: jax.Array, ids: jax.Array, before: jax.Array) -> jax.Array:
    return joined(before, recent(inputs, mark(ids, 1), 3))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, -1, 1, 1, 0], [0, 3, 4]),
        ([1, 1, 0, 0, 0], [9, 1, 2]),
        ([1, -1, 0, 0, 0], [9, 1, 0]),
        ([2, 2, 0, 0, 0], [0, 1, 2]),
        ([1, 2, 2, 0, 0], [0, 2, 3]),
        ([0, 0, 0, 0, 0], [7, 8, 9]),
    ],
)
def test_the_last_inputs_are_of_the_last_document(ids: list[int], expected: list[int]) -> None:
    inputs = jnp.arange(1, 6, dtype=jnp.float32)[None, None]
    found = behind(inputs, jnp.asarray([ids], jnp.int32), jnp.asarray(BEFORE))
    np.testing.assert_array_equal(found[0, 0], expected)
