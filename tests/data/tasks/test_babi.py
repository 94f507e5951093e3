"""bAbI's released layout, on stories made up here."""

import io
import tarfile

import numpy as np
import pytest

from jaxblt.data import OFFSET, TaskDataConfig, make_dataset
from jaxblt.data.tasks import Babi
from jaxblt.data.tasks.babi import read_questions, split_words
from jaxblt.evaluation.tasks import majority_baseline

STORY = """1 Ann went to the attic.
2 Where is Ann? \tattic\t1
3 Ann got the key and the lamp.
4 What is Ann carrying?\tkey,lamp\t3
1 Bob is in the cellar.
2 Where is Bob?\tcellar\t1
"""


def story(person, place):
    return f"1 {person} went to the {place}.\n2 Where is {person}?\t{place}\t1\n"


FILES = {
    "en/qa1_one-fact_train.txt": "".join(story(f"Ann{i}", "attic") for i in range(60)),
    "en/qa1_one-fact_test.txt": story("Eve", "attic"),
    "en/qa8_lists_train.txt": STORY * 10,
    "en/qa8_lists_test.txt": STORY,
    "en-valid/qa1_train.txt": story("Ann", "attic"),
    "en-valid/qa1_valid.txt": story("Joe", "cellar"),
    "en-valid/qa1_test.txt": story("Eve", "attic"),
}


@pytest.fixture(params=["folder", "archive"])
def release(request, tmp_path):
    if request.param == "folder":
        for name, text in FILES.items():
            (tmp_path / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tasks" / name).write_text(text)
        return str(tmp_path)
    with tarfile.open(tmp_path / "babi.tar.xz", "w:xz") as archive:
        for name, text in FILES.items():
            member = tarfile.TarInfo(f"tasks/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return str(tmp_path / "babi.tar.xz")


def test_a_question_comes_with_what_was_told_before_it_and_no_fact_numbers():
    first, second, third = read_questions(STORY, "")
    assert first == (0, ("Ann went to the attic.", "Where is Ann? "), "attic")
    assert second.sentences[:2] == ("Ann went to the attic.", "Ann got the key and the lamp.")
    assert second.answer == "key,lamp"
    assert third == (1, ("Bob is in the cellar.", "Where is Bob?"), "cellar")
    assert split_words(third.sentences[1]) == ["where", "is", "bob", "?"]


def test_splits_and_tasks(release):
    task = Babi(path=release, tasks=(8, 1), max_words=60)
    train, validation, test = (task.open(split) for split in ("train", "validation", "test"))
    assert test.group_names == ("qa8", "qa1")
    assert test.groups.tolist() == [0, 0, 0, 1]
    assert train.count + validation.count == 60 + 30
    assert min(train.count, validation.count) > 0
    inputs, targets, scored = test.example(1)
    assert scored.tolist() == [False] * (len(inputs) - 1) + [True]
    vocabulary = sorted(set(split_words(" ".join(FILES[n] for n in FILES if n.startswith("en/")))))
    vocabulary = sorted({*vocabulary, "key,lamp"} - set(map(str, range(10))))
    assert vocabulary[targets[-1] - OFFSET] == "key,lamp"
    assert [vocabulary[i - OFFSET] for i in inputs[1:6]] == ["ann", "went", "to", "the", "attic"]


def test_files_for_validation_are_used_where_they_are(release):
    task = Babi(path=release, subset="en-valid", tasks=(1,))
    assert [task.open(split).count for split in ("train", "validation", "test")] == [1, 1, 1]


def test_ids_do_not_depend_on_the_tasks_chosen(release):
    alone = Babi(path=release, tasks=(1,)).open("test").example(0)
    joint = Babi(path=release, tasks=(8, 1)).open("test").example(3)
    assert np.array_equal(alone.inputs, joint.inputs)


def test_long_stories_lose_their_beginning(release):
    whole = Babi(path=release, tasks=(8,)).open("test").example(1)
    short = Babi(path=release, tasks=(8,), max_words=7).open("test").example(1)
    assert np.array_equal(short.inputs[1:], whole.inputs[-8:])


def test_rows_come_in_buckets_and_carry_their_task(release):
    config = TaskDataConfig(
        task=Babi(path=release, tasks=(8, 1), max_words=60), seq_len=62, batch_size=3, buckets=(13,)
    )
    data = make_dataset(config, split="test", mode="eval")
    batches = [(data.batch(step), data.groups(step)) for step in range(data.num_batches)]
    assert [batch.inputs.shape[1] for batch, _ in batches] == [13, 62]
    assert [groups.tolist() for _, groups in batches] == [[0, 0, 1], [0, -1, -1]]
    assert sum(int(batch.loss_mask.sum()) for batch, _ in batches) == 4


def test_the_majority_answer_is_of_each_task(release):
    scores = majority_baseline(Babi(path=release, tasks=(8, 1)))
    assert scores.exact == (1 / 3, 1.0)
    assert scores.rows == (3, 1)
    assert scores.solved == 1


def test_what_is_missing_is_named(release):
    with pytest.raises(FileNotFoundError, match=r"no qa3_\*_train.txt of subset 'en'"):
        Babi(path=release, tasks=(3,)).open("train")
    with pytest.raises(FileNotFoundError, match="holds no files hn/qa"):
        Babi(path=release, subset="hn").open("train")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Babi(path=release + "x").open("train")


def test_two_copies_are_not_read_as_one(tmp_path):
    for copy, where in (("a", "attic"), ("b", "cellar")):
        (tmp_path / copy / "en").mkdir(parents=True)
        (tmp_path / copy / "en" / "qa1_train.txt").write_text(story("Ann", where))
    with pytest.raises(ValueError, match=r"holds en/qa1_\*_train.txt twice: leave one copy"):
        Babi(path=str(tmp_path)).open("train")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 Ann left.\nWhere is Ann?", r"line 2: 'Where is Ann\?', expected a number"),
        ("1 Ann left.\n2 Where is Ann?\t\t1", "line 2: .*, expected an answer between tabs"),
        ("2 Where is Ann?\tattic\t1", "line 1: .*, expected number 1: its story has no beginning"),
    ],
)
def test_a_bad_line_is_named(text, said):
    with pytest.raises(ValueError, match=f"qa1 test, {said}"):
        list(read_questions(text, "qa1 test"))


def test_a_task_without_questions_is_named(tmp_path):
    """Scores of a run would end without it, after training."""
    (tmp_path / "en").mkdir()
    for name, text in (("qa1_train", story("Ann", "attic")), ("qa1_test", STORY), ("qa2_test", "")):
        (tmp_path / "en" / f"{name}.txt").write_text(text)
    with pytest.raises(ValueError, match="no example for split 'test': the file of task 2 holds too few"):
        Babi(path=str(tmp_path), tasks=(1, 2)).open("test")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "qa1_test.txt").write_bytes(b"1 Ann \xff left.")
    with pytest.raises(ValueError, match=r"en/qa1_\*_test.txt is no text .*: copy it again"):
        Babi(path=str(tmp_path), tasks=(1,)).open("test")
