"""The benchmark of copies: its rows by hand, and its figures."""

import json
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.tasks.copies import Settings, as_tape, copies, draw_rows
from jaxblt.data.vocab import BOS, EOS, OFFSET
from jaxblt.mixers.cells.experimental.addressing import STRONG, SURE

TINY = Settings(
    steps=50, symbols=8, trained=2, ramp=0.5, tested=(2, 3), rows=2, test_rows=4, dim=8, slots=4, width=4
)


drawn = jax.jit(draw_rows, static_argnums=(0, 2, 3, 4, 5))


def test_rows_are_symbols_and_their_copy() -> None:
    inputs, targets, scored = (
        np.asarray(x) for x in drawn(replace(TINY, marked=False), jax.random.key(0), 64, 1, 5, 6)
    )
    lengths = scored.sum(1)
    assert set(lengths) == {1, 2, 3, 4, 5}
    for row, answers, asked, n in zip(inputs, targets, scored, lengths, strict=True):
        assert row[n] == EOS
        assert ((row[:n] >= OFFSET) & (row[:n] < OFFSET + 8)).all()
        assert list(answers[asked]) == list(row[:n])
        assert list(row[n + 1 : 2 * n + 1]) == list(row[:n])
        assert not answers[2 * n :].any()
    assert len({tuple(row) for row in inputs}) > 40


def test_marked_rows_begin_with_bos() -> None:
    plain, marked = (
        jax.device_get(drawn(replace(TINY, marked=marked), jax.random.key(0), 8, 1, 3, 3))
        for marked in (False, True)
    )
    assert (marked.inputs[:, 0] == BOS).all()
    assert not marked.scored[:, 0].any()
    np.testing.assert_array_equal(marked.inputs[:, 1:], plain.inputs)
    np.testing.assert_array_equal(marked.targets[:, 1:], plain.targets)
    np.testing.assert_array_equal(marked.scored[:, 1:], plain.scored)


def test_a_tape_is_sharp_addresses_in_the_place_of_no_biases() -> None:
    module = TINY.model().build(dtype=jnp.float32)
    params = nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32)))
    params, tape = jax.device_get((params, as_tape(params, TINY.width)))
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(tape), strict=True)
    ((before, after),) = ((a, b) for a, b in pairs if (a != b).any())
    assert not before.any()
    np.testing.assert_array_equal(np.unique(after), [0, SURE, STRONG])
    assert np.count_nonzero(after) == 6


def test_settings_that_could_not_be_tested_are_refused() -> None:
    with pytest.raises(ValueError, match="slots must be at least 81, got 64: BOS and the symbols"):
        Settings(slots=64)
    with pytest.raises(ValueError, match="tested is empty: name at least one number"):
        Settings(tested=())


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/tasks/test_copies")
def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "copies.json"
    found = copies(str(out), 2, 3, TINY)
    assert json.loads(out.read_text())["lengths"] == json.loads(json.dumps(found["lengths"]))
    assert found["seeds"] == [3, 4]
    assert [len(tested["whole"]) for tested in found["lengths"]] == [2, 2]
    assert [tested["symbols"] for tested in found["lengths"]] == [2, 3]
    assert len(found["accuracy_by_chunk"]) == 1
    assert all(1 <= longest <= TINY.trained for longest in found["longest_of_training"])
    with pytest.raises(ValueError, match="--seeds must be at least 1, got 0"):
        copies(str(out), 0, settings=TINY)
