"""Prefetched batches are those of the dataset, from any step on, and the step is the whole state."""

import json

import numpy as np
import pytest

from jaxblt.data import DataConfig, make_dataset

CONFIG = DataConfig(sample="lambda", seq_len=256, batch_size=4, reverse_complement=True)


@pytest.fixture(scope="module")
def dataset():
    return make_dataset(CONFIG)


def take(iterator, count):
    return [np.asarray(next(iterator).inputs) for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resuming_at_any_step_equals_running_through(dataset, prefetch):
    through = dataset.iterator(prefetch=prefetch)
    expected = take(through, 12)
    for step in (0, 1, 7):
        resumed = dataset.iterator(step, prefetch=prefetch)
        assert np.array_equal(take(resumed, 12 - step), expected[step:])
        assert resumed.step == 12
        resumed.close()
    through.close()
    assert np.array_equal(expected, [dataset.batch(s).inputs for s in range(12)])


def test_the_state_is_one_integer(dataset):
    iterator = dataset.iterator(5)
    take(iterator, 2)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"step": 7}
    expected = take(iterator, 2)
    iterator.set_state(state)
    assert np.array_equal(take(iterator, 2), expected)
    iterator.close()


def test_evaluation_ends():
    dataset = make_dataset(CONFIG, split="test", mode="eval")
    batches = list(dataset.iterator())
    assert len(batches) == dataset.num_batches
    assert sum(int(np.asarray(b.loss_mask).sum()) for b in batches) == dataset.num_bytes
    last = np.asarray(batches[-1].segment_ids)
    assert (last[-1] == 0).all()  # 19 rows in batches of 4
    assert list(dataset.iterator(len(batches))) == []


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.timeout(180)
def test_worker_processes_keep_the_order(dataset):
    iterator = dataset.iterator(3, prefetch=1, workers=2)
    assert np.array_equal(take(iterator, 5), [dataset.batch(s).inputs for s in range(3, 8)])
    iterator.close()


def test_negative_options_are_errors(dataset):
    with pytest.raises(ValueError, match="must be at least 0, got -1, 4 and 0"):
        dataset.iterator(-1)
