"""Rows of distinct and of equal pairs."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark.tasks.state_counts import Settings, draw_rows, share_paid
from jaxblt.mixers import StateEngineConfig

drawn = jax.jit(draw_rows, static_argnums=(0, 2))


def test_a_rows_second_half_asks_for_the_values_of_the_first() -> None:
    settings, equal = Settings(), np.arange(16) % 2 == 0
    inputs, targets, scored = (
        np.asarray(x) for x in drawn(settings, jax.random.key(0), 16, jnp.asarray(equal))
    )
    assert set(scored.sum(1)) == {settings.pairs}
    for row, answers, asked, same in zip(inputs, targets, scored, equal, strict=True):
        shown = row[: 2 * settings.pairs]
        held = dict(zip(shown[::2], shown[1::2], strict=True))
        assert len(held) == (1 if same else settings.pairs)
        assert [held[key] for key in row[asked]] == list(answers[asked])


def test_the_engine_has_a_price_on_its_count() -> None:
    engine = Settings(count_weight=0.02).model().stack.mixer("engine")
    assert isinstance(engine, StateEngineConfig)
    assert (engine.adaptive_count, engine.count_weight, engine.slots) == (True, 0.02, 24)


def test_a_row_pays_in_full_or_as_far_as_it_is_answered() -> None:
    rows = drawn(Settings(pairs=2), jax.random.key(0), 2, jnp.asarray([True, False]))
    right = 20 * jax.nn.one_hot(rows.targets, 32)
    np.testing.assert_allclose(share_paid("answered", right.at[0].set(0), rows), [1 / 32, 1], rtol=1e-4)
    assert share_paid("full", right, rows) == 1
    np.testing.assert_allclose(share_paid("whole", right.at[0].set(0), rows), [1 / 32**2, 1], rtol=1e-4)
