"""Rows of tasks: what is refused, and what the pipeline makes of an example."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from jaxblt.data import (
    BOS,
    EOS,
    OFFSET,
    PAD,
    BytesSource,
    TaskDataConfig,
    make_dataset,
    question_and_answer,
)
from jaxblt.data.draws import Draws
from jaxblt.data.examples import Example
from jaxblt.data.schedule import Endless
from jaxblt.data.tasks.generated import GeneratedTask


@dataclass(frozen=True)
class Counting:
    """Example n is n + 1 questions "7" and the answer n; a training split without end where `count` is None."""

    count: int | None = 5
    vocab_size: int = 300
    length: int = 9

    def open(self, split, *, seed=0):
        return Counted(self.count)


@dataclass(frozen=True)
class Counted:
    count: int | None
    groups = None
    group_names = ()

    @property
    def lengths(self):
        return None if self.count is None else np.arange(self.count) + 3

    def example(self, number):
        return question_and_answer(np.full(number % 6 + 1, OFFSET + 7), np.array([OFFSET + number]))


CONFIG = TaskDataConfig(task=Counting(), seq_len=10, batch_size=2)


def test_an_example_becomes_a_row():
    batch = make_dataset(CONFIG, mode="eval").batch(1)
    seven, pads = OFFSET + 7, [0] * 4
    assert batch.inputs[1].tolist() == [BOS, *[seven] * 4, EOS, *[PAD] * 4]
    assert batch.targets[1].tolist() == [*[seven] * 4, EOS, OFFSET + 3, *[PAD] * 4]
    assert batch.loss_mask[1].tolist() == [0, 0, 0, 0, 0, 1, *pads]
    assert batch.segment_ids[1].tolist() == [*[1] * 6, *pads]
    assert batch.positions[1].tolist() == [0, 1, 2, 3, 4, 5, *pads]


def test_a_dataset_is_shown_without_its_examples():
    assert repr(make_dataset(CONFIG, mode="eval")) == "<TaskDataset: eval, rows of (10,), 5 in all>"


def test_one_pass_holds_every_example_once_and_ends_in_empty_rows():
    data = make_dataset(CONFIG, mode="eval")
    rows = [row for step in range(data.num_batches) for row in zip(*_answers(data.batch(step)), strict=True)]
    assert rows == [(OFFSET, 1), (OFFSET + 1, 1), (OFFSET + 2, 1), (OFFSET + 3, 1), (OFFSET + 4, 1), (0, 0)]
    assert data.groups(2).tolist() == [0, -1]


def _answers(batch):
    return (batch.targets * batch.loss_mask).sum(1).tolist(), batch.loss_mask.sum(1).tolist()


def test_buckets_hold_every_example_once():
    data = make_dataset(replace(CONFIG, buckets=(4, 6)), mode="eval")
    batches = [data.batch(step) for step in range(data.num_batches)]
    assert [b.inputs.shape[1] for b in batches] == [4, 6, 10]
    answers = [i for b in batches for i in _answers(b)[0] if i]
    assert sorted(answers) == [OFFSET + n for n in range(5)]


def test_endless_rows_never_come_twice():
    schedule = Endless(3)
    rows = [schedule.row(schedule.place(step), slot) for step in range(5) for slot in range(3)]
    assert rows == list(range(15))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_len": 8}, "seq_len must be at least 9, the longest example of Counting, got 8"),
        ({"task": Counting}, "task must be the config of a task"),
        ({"task": "mqar"}, "task must be the config of a task, such as MQAR\\(\\), got 'mqar'"),
    ],
)
def test_a_bad_config_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (CONFIG, {"split": "all"}, "a task has no split 'all'"),
        (CONFIG, {"source": BytesSource([b"a"])}, "a task brings its own rows"),
        (replace(CONFIG, task=Counting(None)), {"mode": "eval"}, "split 'train' of Counting has no end"),
        (
            replace(CONFIG, task=Counting(None), buckets=(4,)),
            {},
            r"buckets \(4,\) need examples whose lengths",
        ),
        (CONFIG, {"process_count": 3}, "batch_size = 2 must be a multiple of process_count = 3"),
    ],
)
def test_what_cannot_be_opened_says_why(config, options, said):
    with pytest.raises(ValueError, match=said):
        make_dataset(config, **options)


@dataclass(frozen=True, kw_only=True)
class OwnTask(GeneratedTask):
    """A task as a user writes one, with a mistake."""

    mistake: str = ""
    vocab_size = 300
    length = 4

    def draw(self, draws: Draws) -> Example:
        ids = np.array([4, 5, 6, 7]) + int(draws.uniform(1)[0] * 100)
        if self.mistake == "long":
            ids = np.repeat(ids, 2)
        if self.mistake == "vocabulary":
            ids = ids + 300
        if self.mistake == "floats":
            ids = ids + 0.5
        return Example(ids, ids, np.ones(len(ids), np.float32))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (
            "long",
            r"OwnTask gave an example of 8 positions for a row of 4: its `length` must be that of its longest",
        ),
        ("vocabulary", r"ids of OwnTask must be integers in 0\.\.299, as its `vocab_size` says, got 3\d\d"),
        ("floats", r"got .* of float64"),
    ],
)
def test_examples_of_a_task_of_ones_own_are_looked_at(mistake: str, said: str) -> None:
    config = TaskDataConfig(task=OwnTask(mistake=mistake), seq_len=4, batch_size=2)
    with pytest.raises(ValueError, match=said):
        make_dataset(config, split="train", mode="train").batch(0)
    fine = TaskDataConfig(task=OwnTask(), seq_len=4, batch_size=2)
    assert make_dataset(fine, split="train", mode="train").batch(0).inputs.shape == (2, 4)
