import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import BOS, OFFSET, PAD
from jaxblt.training.objectives.objectives import (
    MASK,
    Masked,
    NextByte,
    OrderAgnostic,
    Span,
    document_ends,
    span_start_rate,
)
from tests.training.tiny import random_batch

KEY = jax.random.key(3)
BIDIRECTIONAL = [Masked(), Span(), OrderAgnostic()]


@pytest.fixture(scope="module")
def batch():
    batch = random_batch(0, rows=64, length=512, letters=bytes(range(97, 123)))
    return batch.replace(inputs=batch.inputs.at[:, 0].set(BOS), entropies=jnp.zeros(batch.inputs.shape))


def test_next_byte_is_the_batch_as_it_is(batch):
    assert NextByte()(KEY, batch) is batch


@pytest.mark.parametrize("objective", BIDIRECTIONAL, ids=lambda o: type(o).__name__)
def test_asks_for_true_bytes_where_they_were_hidden(objective, batch):
    asked = jax.jit(objective)(KEY, batch)
    scored = np.asarray(asked.loss_mask) > 0
    changed = np.asarray(asked.inputs != batch.inputs)
    assert scored.any()
    assert not (changed & ~scored).any()
    np.testing.assert_array_equal(asked.targets, batch.inputs)
    assert not scored[np.asarray(batch.segment_ids) == 0].any()
    assert not scored[np.asarray(batch.inputs) < OFFSET].any()
    assert asked.entropies is None
    assert not objective.causal
    for name in ("segment_ids", "positions"):
        np.testing.assert_array_equal(getattr(asked, name), getattr(batch, name))


@pytest.mark.slow(days=28, group="costly", turn="training/objectives/test_objectives", every="Masked")
@pytest.mark.parametrize("objective", BIDIRECTIONAL, ids=lambda o: type(o).__name__)
def test_key_decides(objective, batch):
    first, again, other = (objective(key, batch).inputs for key in (KEY, KEY, jax.random.key(4)))
    np.testing.assert_array_equal(first, again)
    assert (np.asarray(first) != np.asarray(other)).any()


def within(count, total, rate):
    """Five standard deviations of a binomial."""
    assert abs(count - total * rate) < 5 * np.sqrt(total * rate * (1 - rate)), (count, total * rate)


def test_masked_rates(batch):
    asked = Masked()(KEY, batch)
    allowed = (np.asarray(batch.segment_ids) > 0) & (np.asarray(batch.inputs) >= OFFSET)
    scored = np.asarray(asked.loss_mask) == 1
    within(scored.sum(), allowed.sum(), 0.15)
    shown, true = np.asarray(asked.inputs)[scored], np.asarray(batch.inputs)[scored]
    within((shown == MASK).sum(), scored.sum(), 0.8)
    # of the 10 % swapped, 1 in 256 draws the same byte
    within(((shown != MASK) & (shown != true)).sum(), scored.sum(), 0.1 * 255 / 256)
    assert (shown[shown != MASK] >= OFFSET).all()


@pytest.mark.parametrize(("rate", "longest"), [(0.2, 10), (0.5, 3), (0.15, 1)])
def test_span_covers_its_rate_away_from_document_starts(rate, longest, batch):
    scored = np.asarray(Span(rate=rate, max_length=longest)(KEY, batch).loss_mask) == 1
    inside = (np.asarray(batch.positions) >= longest) & (np.asarray(batch.segment_ids) > 0)
    # bytes of a span are not independent: widen by the span's length
    total = inside.sum()
    assert abs(scored[inside].mean() - rate) < 5 * np.sqrt(longest * rate * (1 - rate) / total)


@pytest.mark.slow(days=28, group="costly", turn="training/objectives/test_objectives")
def test_span_hides_whole_runs_and_stays_in_its_document():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]], jnp.int32)
    np.testing.assert_array_equal(document_ends(segments), [[3, 3, 3, 7, 7, 7, 7, 8]])
    batch = random_batch(1, rows=256, length=32)
    asked = jax.jit(Span(rate=0.05, max_length=10))(KEY, batch)
    scored = np.asarray(asked.loss_mask) == 1
    assert (np.asarray(asked.inputs)[scored] == MASK).all()
    assert (scored[:, :-1] & scored[:, 1:]).sum() > 100
    # a run that goes on over a document's edge needs a start of its own there: no more often than chance
    edge = 16
    starts = scored[:, edge] & scored[:, edge - 1]
    alone = scored[:, edge] & ~scored[:, edge - 1]
    share = span_start_rate(0.05, 10)
    within(starts.sum() + alone.sum(), 256, share)


def test_span_start_rate_solves_its_equation():
    for rate, longest in [(0.2, 10), (0.9, 4), (0.3, 1)]:
        p = span_start_rate(rate, longest)
        bare = np.prod([1 - p * (longest - j) / longest for j in range(longest)])
        assert abs(1 - bare - rate) < 1e-9


def test_order_agnostic_weighs_by_the_share_hidden(batch):
    asked = OrderAgnostic()(KEY, batch)
    weights = np.asarray(asked.loss_mask)
    allowed = (np.asarray(batch.segment_ids) > 0) & (np.asarray(batch.inputs) >= OFFSET)
    total, hidden = allowed.sum(1), (weights > 0).sum(1)
    assert (np.asarray(asked.inputs)[weights > 0] == MASK).all()
    # each row's weights are all D/n, so they sum to D
    np.testing.assert_allclose(weights.sum(1), total, rtol=1e-5)
    for row in range(len(weights)):
        np.testing.assert_allclose(weights[row][weights[row] > 0], total[row] / hidden[row], rtol=1e-6)


def test_order_agnostic_hides_any_number_and_any_set():
    batch = random_batch(2, rows=6000, length=8)
    allowed = int((np.asarray(batch.segment_ids[0]) > 0).sum())
    scored = np.asarray(jax.jit(OrderAgnostic())(KEY, batch).loss_mask) > 0
    numbers = np.bincount(scored.sum(1), minlength=allowed + 1)
    assert numbers[0] == 0
    for count in numbers[1:]:
        within(count, 6000, 1 / allowed)
    for position in range(allowed):
        within(scored[:, position].sum(), 6000, (allowed + 1) / 2 / allowed)


@pytest.mark.slow(days=28, group="costly")
def test_a_row_of_padding_asks_for_nothing():
    batch = random_batch(0, rows=2)
    empty = batch.replace(
        segment_ids=jnp.zeros_like(batch.segment_ids), inputs=jnp.full_like(batch.inputs, PAD)
    )
    for objective in BIDIRECTIONAL:
        asked = jax.jit(objective)(KEY, empty)
        assert float(jnp.sum(asked.loss_mask)) == 0
        np.testing.assert_array_equal(asked.inputs, empty.inputs)
