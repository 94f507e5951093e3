"""Schedules: each row once an epoch, whatever the batch size, and nothing but arithmetic."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data.schedule import LEAST_SHARE, EasyFirst, Endless, OnePass, Place, Shuffled, Staged, spread

row_counts = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@st.composite
def buckets(draw):
    """Rows of each bucket, and the size of a batch of all or of each."""
    rows = draw(row_counts)
    sizes = st.integers(1, 5)
    return rows, draw(st.one_of(sizes, st.tuples(*[sizes for _ in rows])))


def size_of(schedule, bucket):
    return schedule.batch_size if isinstance(schedule.batch_size, int) else schedule.batch_size[bucket]


@pytest.mark.slow(days=28, group="costly", turn="data/test_schedule")
@given(buckets(), st.integers(0, 3))
def test_each_bucket_is_read_epoch_by_epoch(rows_and_sizes, seed):
    rows, batch_size = rows_and_sizes
    schedule = Shuffled(rows, batch_size, seed)
    read: dict[int, dict[int, int]] = {b: {} for b in range(len(rows))}
    for step in range(60):
        place = schedule.place(step)
        for slot in range(size_of(schedule, place.bucket)):
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


@given(buckets(), st.integers(1, 4))
def test_batches_of_whole_epochs_are_dealt_together(rows_and_sizes, epochs):
    """Behind e epochs a bucket of n rows has yielded n e / B batches, rounded up."""
    rows, batch_size = rows_and_sizes
    schedule = Shuffled(rows, batch_size, 0)
    due = {b: -(-epochs * n // size_of(schedule, b)) for b, n in enumerate(rows)}
    assert Counter(schedule.place(step).bucket for step in range(sum(due.values()))) == due


def test_buckets_are_read_in_proportion():
    schedule = Shuffled((100, 300), 4, 0)
    drawn = Counter(schedule.place(step).bucket for step in range(1000))
    assert drawn == {0: 250, 1: 750}
    order = [schedule.place(step).bucket for step in range(100)]
    assert order != sorted(order)
    assert order != [schedule.place(step).bucket for step in range(100, 200)]


def test_buckets_of_as_many_rows_have_orders_of_their_own():
    schedule = Shuffled((50, 50), 1, 0)
    orders = [[schedule.row(Place(bucket, i), 0) for i in range(50)] for bucket in (0, 1)]
    assert orders[0] != orders[1]


def test_epochs_and_seeds_differ():
    def epoch(schedule, first):
        return [schedule.row(schedule.place(first + i), 0) for i in range(20)]

    orders = {tuple(epoch(Shuffled((20,), 1, seed), e * 20)) for seed in range(3) for e in range(3)}
    assert len(orders) == 9
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(20))}


def test_far_steps_are_as_quick():
    schedule = Shuffled((7, 1_000_000), 64, 1)
    assert 0 <= schedule.row(schedule.place(10**12), 63) < 1_000_000


@given(buckets())
def test_one_pass_reads_each_row_once_in_order(rows_and_sizes):
    rows, batch_size = rows_and_sizes
    schedule = OnePass(rows, batch_size)
    read = []
    for step in range(len(schedule)):
        place = schedule.place(step)
        read += [(place.bucket, schedule.row(place, slot)) for slot in range(size_of(schedule, place.bucket))]
    assert [x for x in read if x[1] is not None] == [(b, r) for b, n in enumerate(rows) for r in range(n)]
    assert len(read) < sum(rows) + sum(size_of(schedule, b) for b in range(len(rows)))


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
    late = schedule.place(40)
    assert len({schedule.row(late, slot) for slot in range(8)}) > 1
    behind = [schedule.row(schedule.place(50 + i), slot) for i in range(25) for slot in range(8)]
    then = schedule.then
    assert behind == [then.row(then.place(i), slot) for i in range(25) for slot in range(8)]


def test_a_curriculum_of_few_rows_begins_with_one():
    schedule = EasyFirst((3, 1, 0, 2), 1, 10, Shuffled((4,), 1, 0), 0)
    assert schedule.row(schedule.place(0), 0) == 3


def test_stages_follow_each_other_and_begin_anew():
    stages = tuple(Shuffled((7,), 2, seed) for seed in (0, 1))
    schedule = Staged(stages, (0, 5))
    for step, (stage, own) in {0: (0, 0), 4: (0, 4), 5: (1, 0), 9: (1, 4)}.items():
        place = schedule.place(step)
        assert place == Place(stage, stages[stage].place(own).sample)
        assert [schedule.row(place, slot) for slot in (0, 1)] == [
            stages[stage].row(stages[stage].place(own), slot) for slot in (0, 1)
        ]


def test_endless_rows_never_come_twice():
    schedule = Endless(4)
    assert [schedule.row(schedule.place(step), slot) for step in (3, 4) for slot in range(4)] == [
        *range(12, 20)
    ]


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_share_of_a_pass_is_spread_over_it(batches, most):
    steps = spread(batches, most)
    assert spread(batches, None) == list(range(batches))
    assert len(steps) == min(most, batches)
    assert steps[0] == 0
    gaps = {later - earlier for earlier, later in zip(steps, [*steps[1:], batches], strict=True)}
    assert max(gaps) - min(gaps) <= 1
    assert min(gaps) >= 1
