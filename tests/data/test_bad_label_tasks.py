"""What is wrong with several columns of labels is named in one line."""

import pytest

from jaxblt.data import LabelledDataConfig, LabelTask, make_dataset, with_classes
from jaxblt.data.label_tasks import task_targets
from jaxblt.data.labelled import read_parts
from tests.data.test_label_tasks import TASKS, config_of, here, write, write_fasta, write_jsonl, write_table

__all__ = ["here"]


@pytest.mark.parametrize(
    ("tasks", "file", "said"),
    [
        (
            ("kind", "sort"),
            "r.csv",
            r"r.csv:1 has no column 'sort', it has \['id', 'kind', 'size', 'hard', 'seq",
        ),
        (
            ("sort", "kind"),
            "r.fa.gz",
            r"'labels.tsv' has no column 'sort', it has \['size', 'kind', 'id', 'hard'\]",
        ),
        (
            ("sort", "kind"),
            "r.jsonl",
            r"task 'sort' has no label among \d+ training records: fill its column, or",
        ),
        (
            ("kind", "none"),
            "n.csv",
            r"task 'none' has no label among \d+ training records: fill its column, or lea",
        ),
        (
            ("kind", "same"),
            "n.csv",
            r"the labels of task 'same' name one class, \['x'\]: a model can only tell two",
        ),
        (
            ("kind",),
            "r.bed",
            r"'r.bed' has one label an interval and no column 'kind': put the sequences into a tab",
        ),
    ],
)
def test_columns_without_labels(here, tasks, file, said):
    for make in (write_table, write_jsonl, write_fasta):
        make()
    rows = "".join(f"{'ab'[i % 2]},,{'x' if i % 3 else ''},{'A' * i}C\n" for i in range(20))
    write("n.csv", f"kind,none,same,sequence\n{rows}")
    write("r.bed", "r0\t0\t2\ta\n")
    fields = {"r.fa.gz": {"labels": "labels.tsv"}, "r.bed": {"genome": "r.fa.gz"}}.get(file, {})
    columns = tuple(map(LabelTask, tasks))
    with pytest.raises(ValueError, match=said) as caught:
        with_classes(config_of(file, tasks=columns, seq_len=32, **fields))
    assert "\n" not in str(caught.value)


def test_cells_that_are_no_labels(here):
    write("r.csv", "sequence,kind,size,hard\nAC,a,1,1\nAG,b,NA,\nAT,,2,easy\n")
    records = read_parts(config_of("r.csv", split="files"))["train"]
    with pytest.raises(ValueError, match=r"r.csv:3: label 'NA' of 'r.csv:3' is no finite number"):
        task_targets((LabelTask("kind", classes=("a", "b")), TASKS[1]), records)
    with pytest.raises(ValueError, match=r"r.csv:2: label 'a' of 'r.csv:2' is none of the classes b, c"):
        task_targets((LabelTask("kind", classes=("b", "c")),), records)
    hard = with_classes(config_of("r.csv", tasks=TASKS[:1], easy_first=4, difficulty="hard", split="files"))
    with pytest.raises(
        ValueError, match=r"r.csv:3: hard of 'r.csv:3' is '', expected a finite number: larger for"
    ):
        make_dataset(hard, mode="train")


def test_bad_configs_of_several_tasks():
    for fields, said in (
        ({"tasks": (TASKS[0], TASKS[0])}, "column 'kind' is two tasks: name each column once"),
        (
            {"label": "kind"},
            "label = 'kind', target = 'class' and classes = .. are of one task, and tasks are kind, si",
        ),
        ({"target": "number"}, "target = 'number' and classes = .. are of one task"),
        ({"difficulty": "hard"}, "difficulty = 'hard' orders records for easy_first, which is 0: set it"),
    ):
        with pytest.raises(ValueError, match=said):
            config_of("r.csv", **fields)
    with pytest.raises(
        ValueError, match=r"LabelTask.column must be letters, digits, .* got 'a/b': rename the col"
    ):
        LabelTask("a/b")
    open_classes = LabelledDataConfig(paths=("r.csv",), tasks=TASKS)
    with pytest.raises(ValueError, match="the classes of the labelled data are open"):
        make_dataset(open_classes, mode="train")
