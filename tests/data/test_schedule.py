"""Schedules: each row once an epoch, whatever the batch size, and nothing but arithmetic."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data.schedule import LEAST_SHARE, EasyFirst, OnePass, Shuffled, spread

row_counts = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(row_counts, st.integers(1, 5), st.integers(0, 3))
def test_each_bucket_is_read_epoch_by_epoch(rows, batch_size, seed):
    schedule = Shuffled(rows, batch_size, seed)
    read: dict[int, dict[int, int]] = {b: {} for b in range(len(rows))}
    for step in range(60):
        place = schedule.place(step)
        for slot in range(batch_size):
            sample = place.sample + slot
            assert sample not in read[place.bucket]
            read[place.bucket][sample] = schedule.row(place, slot)
    for bucket, count in enumerate(rows):
        samples = read[bucket]
        for epoch in range(max(samples, default=0) // count):
            seen = [samples[g] for g in range(epoch * count, (epoch + 1) * count) if g in samples]
            assert len(set(seen)) == len(seen)
            if len(seen) == count:
                assert sorted(seen) == list(range(count))


def test_buckets_are_read_in_proportion():
    schedule = Shuffled((100, 300), 4, 0)
    drawn = Counter(schedule.place(step).bucket for step in range(1000))
    assert drawn == {0: 250, 1: 750}


def test_epochs_and_seeds_differ():
    def epoch(schedule, first):
        return [schedule.row(schedule.place(first + i), 0) for i in range(20)]

    orders = {tuple(epoch(Shuffled((20,), 1, seed), e * 20)) for seed in range(3) for e in range(3)}
    assert len(orders) == 9
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(20))}


def test_far_steps_are_as_quick():
    schedule = Shuffled((7, 1_000_000), 64, 1)
    assert 0 <= schedule.row(schedule.place(10**12), 63) < 1_000_000


@given(row_counts, st.integers(1, 5))
def test_one_pass_reads_each_row_once_in_order(rows, batch_size):
    schedule = OnePass(rows, batch_size)
    read = []
    for step in range(len(schedule)):
        place = schedule.place(step)
        read += [(place.bucket, schedule.row(place, slot)) for slot in range(batch_size)]
    assert [x for x in read if x[1] is not None] == [(b, r) for b, n in enumerate(rows) for r in range(n)]
    assert len(read) < sum(rows) + batch_size * len(rows)


def test_one_pass_ends():
    for step in (-1, 3):
        with pytest.raises(IndexError, match=f"step {step} does not exist: one pass has 3 batches"):
            OnePass((5,), 2).place(step)


def test_a_curriculum_begins_with_the_easiest_rows_and_ends_with_all():
    order = tuple(reversed(range(100)))
    schedule = EasyFirst(order, 8, 50, Shuffled((100,), 8, 0), 0)
    hardest = []
    for step in range(50):
        place = schedule.place(step)
        hardest.append(max(order.index(schedule.row(place, slot)) for slot in range(8)))
        allowed = 100 * (LEAST_SHARE**2 + (1 - LEAST_SHARE**2) * step / 50) ** 0.5
        assert hardest[-1] < allowed + 1
    assert hardest[0] < 10
    assert max(hardest[40:]) > 80
    behind = [schedule.row(schedule.place(50 + i), slot) for i in range(25) for slot in range(8)]
    assert sorted(behind[:100]) == sorted(behind[100:]) == list(range(100))


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_share_of_a_pass_is_spread_over_it(batches, most):
    steps = spread(batches, most)
    assert spread(batches, None) == list(range(batches))
    assert len(steps) == min(most, batches)
    assert steps[0] == 0
    gaps = {later - earlier for earlier, later in zip(steps, [*steps[1:], batches], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert min(gaps) >= 1
