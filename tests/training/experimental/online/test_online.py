"""Updates while serving: what is forgotten with and without a price, and updates that a gate keeps out."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, attach, split_params
from jaxblt.mixers import GatedRecurrenceConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.experimental.online import (
    CanaryGate,
    DriftMonitor,
    OnlineConfig,
    OnlineLearner,
    ReplayBuffer,
    ewc_penalty,
    make_anchor,
    row_nats,
)
from tests.parameters import drawn

STACK = StackConfig(
    dim=16, num_layers=1, pattern="R", mixers={"R": GatedRecurrenceConfig(dim=16)}, mlp_dim=16
)
MODEL = attach(ByteLMConfig(stack=STACK), AdapterConfig(sites=("mixer/*", "mlp/*"), rank=4))
FREE = 1e9
"""Nats by which a gate that lets all pass may be missed."""
SETTINGS = OnlineConfig(rate=1e-2, steps=80, rows=4, replayed=0)
PRICED, REPLAYED = replace(SETTINGS, ewc=1000.0), replace(SETTINGS, rows=2, replayed=2)


def rows_of(task: int, seed: int, count: int = 8) -> np.ndarray:
    """Return rows in which each byte is followed by the next one of a cycle, which tasks run through at other steps."""
    start = np.random.default_rng([task, seed]).integers(8, size=(count, 1))
    return (40 + (start + np.arange(24) * (1 + 2 * task)) % 8).astype(np.int32)


@pytest.fixture(scope="module")
def start() -> tuple[Any, Any]:
    """The loss of a model whose adapters learn, and their parameters."""
    base, trained = split_params(
        drawn(MODEL.build(), jnp.zeros((1, 24), jnp.int32))["params"], ("embedding",)
    )
    return row_nats(MODEL, base), trained


def learner(start: Any, config: OnlineConfig, *, tolerance: float = FREE, **options: Any) -> OnlineLearner:
    loss, trained = start
    gate = CanaryGate(loss, rows_of(0, 99), tolerance=tolerance)
    return OnlineLearner(config, loss, trained, gate, **options)


@pytest.fixture(scope="module")
def known(start: Any) -> Any:
    """Parameters that learned the first task."""
    first = learner(start, SETTINGS)
    assert first.update(rows_of(0, 0)).accepted
    return first.params


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/online/test_online")
def test_less_is_forgotten_with_a_price_on_what_matters_or_with_replay(start: Any, known: Any) -> None:
    """Of the first task, behind updates with rows of a second one, which is learned all the same; in three seeds."""

    def nats(params: Any, task: int) -> float:
        return CanaryGate(start[0], rows_of(task, 99)).judge(known, params).after

    for seed in range(3):
        lost = {}
        for config in (SETTINGS, PRICED, REPLAYED):
            each = learner(start, config, seed=seed)
            each.params = known
            each.remember(rows_of(0, seed + 1))
            new = each.learn(rows_of(1, seed))
            lost[config] = nats(new, 0) - nats(known, 0)
            assert nats(new, 1) < 0.2 * nats(known, 1)
        assert lost[PRICED] < 0.6 * lost[SETTINGS]
        assert lost[REPLAYED] < 0.2 * lost[SETTINGS]


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/online/test_online")
def test_importance_is_the_mean_square_gradient_of_rows(start: Any, known: Any) -> None:
    loss, rows = start[0], jnp.asarray(rows_of(0, 1, count=2))
    anchor = jax.jit(lambda params: make_anchor(loss, params, rows))(known)
    by_row = jax.jit(jax.jacrev(lambda params: loss(params, rows)))(known)
    jax.tree.map(
        lambda f, g: np.testing.assert_allclose(f, np.mean(np.square(g), 0), rtol=1e-3, atol=1e-9),
        anchor.importance,
        by_row,
    )
    moved = jax.tree.map(lambda p: p + 1, known)
    whole = sum(float(np.sum(f)) for f in jax.tree.leaves(anchor.importance))
    np.testing.assert_allclose(ewc_penalty(anchor, moved), whole / 2, rtol=1e-5)
    assert ewc_penalty(anchor, known) == 0


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/online/test_online")
def test_a_gate_keeps_a_bad_update_out(start: Any, known: Any) -> None:
    """Rows of noise ruin the canary rows, and what serves stays; more rows of the first task may serve."""
    served = learner(start, SETTINGS, tolerance=0.05)
    served.params = known
    noise = np.random.default_rng(5).integers(4, 260, (8, 24)).astype(np.int32)
    verdict = served.update(noise)
    assert not verdict.accepted
    assert verdict.after > verdict.before + 0.05
    assert "nats worse on the canary rows" in verdict.why
    assert served.params is known
    assert served.buffer.seen == 0
    assert served.update(rows_of(0, 7)).accepted
    assert served.params is not known
    assert served.buffer.seen == 8
    still = learner(start, SETTINGS, mask=jax.tree.map(jnp.zeros_like, known))
    jax.tree.map(np.testing.assert_array_equal, still.learn(noise), still.params)
    broken = jax.tree.map(lambda p: p * jnp.nan, known)
    assert "is no number" in served.gate.judge(known, broken).why


def test_a_monitor_finds_a_planted_drift_and_no_other() -> None:
    rng = np.random.default_rng(0)
    monitor = DriftMonitor(rng.normal(2.0, 0.2, 1000).tolist())
    for _ in range(20):
        monitor.watch(rng.normal(2.0, 0.2, 50).tolist())
        assert not monitor.drifts
    monitor.watch(rng.normal(2.4, 0.2, 50).tolist())
    assert monitor.drifts
    monitor.watch([float("nan")])
    assert monitor.drifts
    with pytest.raises(ValueError, match="have no spread to measure drift by"):
        DriftMonitor([1.0, 1.0])


def test_a_buffer_is_an_even_sample_of_all_rows() -> None:
    """Of 100 rows each is among the ten that are kept in about a tenth of 400 buffers."""
    kept = np.zeros(100)
    rows = np.arange(100, dtype=np.int32)[:, None]
    for seed in range(400):
        buffer = ReplayBuffer(10, seed=seed)
        buffer.add(rows[:60])
        buffer.add(rows[60:])
        kept[np.concatenate(buffer.rows)] += 1
    assert kept.sum() == 4000
    assert 20 <= kept.min() < kept.max() <= 65
    assert abs(kept[:50].mean() - kept[50:].mean()) < 3
    with pytest.raises(ValueError, match="the buffer is empty"):
        ReplayBuffer(3).draw(1)
