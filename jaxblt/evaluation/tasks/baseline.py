"""The baseline: always the most common answer of training."""

from collections import Counter

import numpy as np

from jaxblt.data.examples import Examples, TaskSource
from jaxblt.data.splits import SplitName
from jaxblt.evaluation.tasks.scores import TaskScores, summarise

SAMPLE = 2000
"""The most examples that are read of a split without end, or of one whose examples are made anew each time."""


def majority_baseline(
    task: TaskSource, split: SplitName = "test", *, most: int | None = SAMPLE
) -> TaskScores:
    """Score the most common id among training answers, of each subtask by itself.

    Args:
      task: its config.
      split: to score on.
      most: training examples that are counted, and examples that are scored, at the most; None takes all, for splits
        that end.

    Raises:
      ValueError: `most` is None and a split has no end.
    """
    train, scored = task.open("train"), task.open(split)
    names = scored.group_names or ("all",)
    counters = [Counter[int]() for _ in names]
    for number in _numbers(train, most):
        example = train.example(number)
        counters[_group(train, number)].update(example.targets[example.scored].tolist())
    common = [counter.most_common(1)[0][0] if counter else -1 for counter in counters]
    right, asked, groups = [], [], []
    for number in _numbers(scored, most):
        example, group = scored.example(number), _group(scored, number)
        answers = example.targets[example.scored]
        right.append((answers == common[group]).sum())
        asked.append(len(answers))
        groups.append(group)
    return summarise(np.array(right), np.array(asked), np.array(groups), names)


def _numbers(examples: Examples, most: int | None) -> list[int]:
    """Choose at most so many examples, at equal distances over those there are."""
    if examples.count is None:
        if most is None:
            raise ValueError("the split has no end: set `most` to a number of examples")
        return list(range(most))
    count = examples.count if most is None else min(most, examples.count)
    return np.linspace(0, examples.count - 1, count).astype(int).tolist()


def _group(examples: Examples, number: int) -> int:
    return 0 if examples.groups is None else int(examples.groups[number])
