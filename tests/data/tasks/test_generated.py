"""Drawn tasks: answers against independent evaluators, disjoint splits, and rows that depend on nothing else."""

import re
import statistics
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxblt.data import BOS, EOS, OFFSET, Draws, TaskDataConfig, TaskSource, make_dataset
from jaxblt.data.tasks import MQAR, Copy, GapRecall, ListOps, Parity, PatternMatching, RepeatCopy, part_of
from jaxblt.data.tasks.listops import SYMBOLS, show

LISTOPS = ListOps(max_depth=5, max_args=4, min_symbols=4, max_symbols=40)
TASKS = (
    MQAR(symbols=32, pairs=4, positions=24),
    MQAR(symbols=999, positions=48),
    GapRecall(pairs=3, gap=20),
    Copy(min_symbols=4),
    RepeatCopy(min_symbols=3, max_symbols=5, max_repeats=4),
    PatternMatching(text=20, pattern=3),
    Parity(),
    Parity(prefixes=True),
    LISTOPS,
)
EXAMPLES = 60


def shown(task):
    """Which task it is, for the names of tests."""
    return f"{type(task).__name__}{'-prefixes' * getattr(task, 'prefixes', False)}-{task.length}"


every_task = pytest.mark.parametrize("task", TASKS, ids=shown)


def drawn(task, split="train", count=EXAMPLES):
    examples = replace(task, eval_size=count).open(split, seed=3)
    return [examples.example(i) for i in range(count)]


def split_stream(example):
    """The symbols of question and answer, and whether the scored targets are the answer and nothing else."""
    stream = np.append(example.inputs, example.targets[-1])
    assert stream[0] == BOS
    mark = int(np.flatnonzero(stream == EOS)[0])
    assert np.array_equal(stream[1:], example.targets)
    assert np.array_equal(example.scored, np.arange(len(example.inputs)) >= mark)
    return (stream[1:mark] - OFFSET).tolist(), (stream[mark + 1 :] - OFFSET).tolist()


def expression_value(symbols):
    """By Python's own parser: lists become calls."""
    text = re.sub(r"\[(\w+) ", r"\1([", show(symbols)).replace("]", "])")
    text = re.sub(r"(?<=[\d)]) (?=[\dA-Z])", ",", text)
    functions = {
        "MIN": min,
        "MAX": max,
        "MED": lambda x: int(statistics.median(x)),
        "SM": lambda x: sum(x) % 10,
    }
    return eval(text.replace(" ", ""), functions)


def check_recall(task, example):
    inputs, shown_ids = example.inputs - OFFSET, 2 * task.pairs
    keys, values = inputs[0:shown_ids:2].tolist(), inputs[1:shown_ids:2].tolist()
    assert len(set(keys)) == len(set(values)) == task.pairs
    assert max(keys) < task.symbols // 2 <= min(values)
    places = np.flatnonzero(example.scored)
    assert places[0] >= shown_ids
    table = dict(zip(keys, values, strict=True))
    assert sorted(inputs[places]) == sorted(keys)
    assert [table[key] for key in inputs[places]] == (example.targets[places] - OFFSET).tolist()
    others = ~example.scored[:-1]
    assert np.array_equal(example.targets[:-1][others], example.inputs[1:][others])


def check_gap_recall(task, example):
    inputs, pairs, places = example.inputs - OFFSET, 2 * task.pairs, np.flatnonzero(example.scored)
    table = dict(zip(inputs[0:pairs:2].tolist(), inputs[1:pairs:2].tolist(), strict=True))
    assert max(table) < task.symbols <= min(table.values()) <= max(table.values()) < 2 * task.symbols
    filler = inputs[pairs : -task.pairs]
    assert task.min_gap <= len(filler) <= task.gap
    assert 2 * task.symbols <= min(filler) <= max(filler) < 2 * task.symbols + task.fillers
    assert places.tolist() == list(range(len(inputs) - task.pairs, len(inputs)))
    assert sorted(inputs[places].tolist()) == sorted(table)
    assert [table[key] for key in inputs[places].tolist()] == (example.targets[places] - OFFSET).tolist()


def check(task, example):
    """The answer again, from what the row shows."""
    if isinstance(task, GapRecall):
        return check_gap_recall(task, example)
    if isinstance(task, MQAR):
        return check_recall(task, example)
    if isinstance(task, Parity) and task.prefixes:
        bits = (example.inputs[1:] - OFFSET).tolist()
        assert example.scored.tolist() == [False] + [True] * len(bits)
        assert [sum(bits[: i + 1]) % 2 for i in range(len(bits))] == (example.targets[1:] - OFFSET).tolist()
        return None
    question, answer = split_stream(example)
    if isinstance(task, Copy):
        assert answer == question
    elif isinstance(task, RepeatCopy):
        *symbols, number = question
        assert answer == symbols * (number - task.symbols + 1) + [EOS - OFFSET]
    elif isinstance(task, PatternMatching):
        text, pattern = question[: task.text], question[task.text + 1 :]
        assert question[task.text] == task.symbols
        assert len(pattern) == task.pattern
        assert answer == [bytes(pattern) in bytes(text)]
    elif isinstance(task, Parity):
        assert answer == [question.count(1) % 2]
    else:
        assert answer == [expression_value(question)]
    return None


@every_task
def test_answers_are_those_of_an_independent_evaluator(task):
    assert isinstance(task, TaskSource)
    for split in ("train", "test"):
        for example in drawn(task, split, EXAMPLES if task.length < 100 else 20):
            check(task, example)
            assert len(example.inputs) <= task.length
            assert example.scored.any()
            assert min(example.inputs.min(), example.targets.min()) >= 0
            assert max(example.inputs.max(), example.targets.max()) < task.vocab_size


@every_task
def test_no_example_is_in_two_splits(task):
    seen = {
        split: {e.inputs.tobytes() for e in drawn(task, split)} for split in ("train", "validation", "test")
    }
    for split, rows in seen.items():
        assert not any(rows & other for name, other in seen.items() if name != split)
        assert len(rows) > EXAMPLES // 2
    assert all(part_of(e) == "test" for e in drawn(task, "test", 5))


@every_task
def test_the_longest_row_is_reached_and_fits(task):
    lengths = [len(e.inputs) for e in drawn(task)]
    assert max(lengths) <= task.length
    if not isinstance(task, ListOps):  # whose longest rows are rare
        assert max(lengths) == task.length


@pytest.mark.parametrize(
    ("task", "answers"),
    [(PatternMatching(text=20, pattern=3), 2), (Parity(), 2), (Parity(prefixes=True), 2), (LISTOPS, 10)],
    ids=lambda x: type(x).__name__,
)
def test_labels_are_balanced(task, answers):
    examples = drawn(task, count=500)
    found = Counter(int(i) - OFFSET for e in examples for i in e.targets[e.scored])
    assert set(found) == set(range(answers))
    most = max(found.values()) / found.total()
    assert most < 0.57 if answers == 2 else most < 0.3


def test_arena_expressions_have_its_lengths_and_balanced_brackets():
    operators = set(range(10, 14))
    for example in drawn(ListOps(), count=6):
        question, _ = split_stream(example)
        assert 500 < len(question) < 2000
        depths = np.cumsum([(s in operators) - (s == SYMBOLS.index("]")) for s in question])
        assert depths[-1] == 0
        assert (depths[:-1] > 0).all()
        assert max(depths) < 10  # lists around a digit at depth 10


@pytest.mark.parametrize("train_size", [None, 50])
def test_a_row_depends_on_seed_step_and_slot_alone(train_size):
    task = Copy(train_size=train_size, eval_size=40)
    made = TaskDataConfig(task=task, seq_len=48, batch_size=8, seed=5)
    data = make_dataset(made, mode="train")
    parts = [make_dataset(made, process_index=i, process_count=2).batch(7) for i in (0, 1)]
    together = np.concatenate([part.inputs for part in parts])
    assert np.array_equal(data.batch(7).inputs, together)
    assert np.array_equal(data.batch(7, slots=(3,)).inputs[0], together[3])
    assert not np.array_equal(data.batch(8).inputs, together)
    other = make_dataset(replace(made, seed=6))
    assert not np.array_equal(other.batch(7).inputs, together)
    test, again = (
        make_dataset(config, split="test", mode="eval") for config in (made, replace(made, seed=6))
    )
    assert np.array_equal(test.batch(0).inputs, again.batch(0).inputs)
    assert data.num_batches is None
    assert test.num_batches == 5


def test_a_training_set_of_fixed_size_is_read_epoch_by_epoch():
    task = Copy(min_symbols=6, train_size=10)
    data = make_dataset(TaskDataConfig(task=task, seq_len=48, batch_size=5), mode="train")
    epochs = [np.concatenate([data.batch(2 * e + i).inputs for i in (0, 1)]) for e in (0, 1)]
    first, second = ({row.tobytes() for row in epoch} for epoch in epochs)
    assert first == second
    assert len(first) == 10
    assert not np.array_equal(*epochs)


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="unknown split 'dev': choose one of 'train', 'validation', 'test'"):
        Parity().open("dev")  # pyright: ignore[reportArgumentType]


def test_a_task_with_too_few_examples_says_so():
    task = Parity(min_bits=1, max_bits=1)  # two examples
    held = {part_of(task.draw(Draws(key))) for key in range(20)}
    missing = min({"train", "validation", "test"} - held)
    with pytest.raises(ValueError, match=f"split '{missing}': the task has too few different ones"):
        task.open(missing)
