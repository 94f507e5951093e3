"""Stories of bAbI scattered over books, on stories and books made up here."""

from pathlib import Path

import numpy as np
import pytest

from jaxblt.data import BOS, EOS, TaskDataConfig, decode, make_dataset
from jaxblt.data.draws import Draws
from jaxblt.data.tasks import Babilong
from jaxblt.data.tasks.sentences import Sentences
from jaxblt.evaluation.tasks import majority_baseline
from tests.data.tasks.stories import BOOK, PLACES, write_stories


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_stories(tmp_path)
    return tmp_path


def task(folder: Path, **options: int) -> Babilong:
    sizes = {"min_bytes": 200, "max_bytes": 400, "eval_size": 20} | options
    return Babilong(path=str(folder), books=str(folder / "books"), subset="en", **sizes)


def test_rows_hold_the_story_in_order_among_sentences_of_the_splits_books(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        examples = task(folder).open(split)
        for number in range(20):
            inputs, targets, scored = examples.example(number)
            assert inputs[0] == BOS
            assert inputs[-1] == EOS
            assert list(np.flatnonzero(scored)) == [len(inputs) - 1]
            text = decode(inputs[1:-1]).decode()
            *told, question, end = text.replace("?", "?.").split(".")
            assert end == ""
            name = question.strip().removeprefix("Where is ").removesuffix("?")
            woke, went = (i for i, said in enumerate(told) if name in said)
            assert told[woke].strip() == f"{name} woke up"
            assert woke < went
            place = told[went].strip().removeprefix(f"{name} went to the ")
            assert PLACES[int(decode(targets[-1:]))] == place
            others = [said for i, said in enumerate(told) if i not in (woke, went)]
            assert all(split in said or "Title" in said or "came" in said for said in others)
            numbers = [int(said.split()[-1]) for said in others if split in said]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert 200 - 2 * len("Nobody! ") < len(text) <= 400


def test_sizes_lie_between_the_bounds_and_facts_anywhere(folder: Path) -> None:
    examples = task(folder, min_bytes=100, max_bytes=1000).open("train")
    found = [decode(examples.example(n).inputs) for n in range(200)]
    sizes = np.array([len(text) for text in found])
    assert 200 < np.median(sizes) < 500  # the logarithm's middle is 316
    woke, went = (
        np.array([text.index(said) / len(text) for text in found]) for said in (b"woke up", b"went to")
    )
    assert 0.2 < np.mean(woke) < 0.45  # a third without the question
    assert 0.45 < np.mean(went) < 0.7
    assert np.mean(went - woke > 0.5) > 0.1


def test_examples_are_functions_of_split_seed_and_number(folder: Path) -> None:
    def rows(split: str, seed: int) -> list[bytes]:
        examples = task(folder).open(split, seed=seed)
        return [decode(examples.example(n).inputs) for n in range(5)]

    assert rows("train", 1) == rows("train", 1) != rows("train", 2)
    assert rows("test", 1) == rows("test", 2)


def test_no_story_of_training_is_held_out(folder: Path) -> None:
    train, validation = (task(folder).open(split).stories for split in ("train", "validation"))
    assert len(train) + len(validation) == 60
    assert train
    assert validation
    assert not set(train) & set(validation)


def test_a_long_story_stands_alone_or_is_left_out(folder: Path) -> None:
    alone = task(folder, min_bytes=1, max_bytes=60).open("test")
    assert any(
        decode(alone.example(n).inputs[1:-1]).startswith(b"Eve woke up. Eve went to") for n in range(20)
    )
    with pytest.raises(ValueError, match=r"max_bytes = 30 holds no story of task 1: set at least \d\d"):
        task(folder, min_bytes=1, max_bytes=30).open("test")


def test_rows_and_the_majority(folder: Path) -> None:
    data = make_dataset(TaskDataConfig(task=task(folder), seq_len=402, batch_size=4, labels="digit"))
    assert set(np.asarray(data.batch(0).labels)) <= {0, 1, 2}
    scores = majority_baseline(task(folder), most=200)
    assert scores.accuracy[0] in (0.3, 0.35)  # of 20 rows on three stories


def test_what_is_wrong_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="task 2 has 11 different answers, of which one digit tells 10"):
        task(folder, task=2).open("test")
    with pytest.raises(FileNotFoundError, match="no qa3_"):
        task(folder, task=3).open("test")
    with pytest.raises(ValueError, match=r"test' holds \d+ bytes, fewer than the \d+ of a row"):
        task(folder, min_bytes=9000, max_bytes=9000).open("test").example(0)
    (folder / "books" / "test" / "1.txt").unlink()
    with pytest.raises(FileNotFoundError, match="glob matches no file"):
        task(folder).open("test")
    with pytest.raises(IndexError, match="example 20 does not exist"):
        task(folder).open("validation").example(20)


def test_sentences_end_where_a_mark_is_followed_by_white_space() -> None:
    found = Sentences([BOOK, b"2.5 kg. Ja"], "here")
    said = [found.text[a:b] for a, b in zip(found.starts[:-1], found.starts[1:], strict=True)]
    assert said[:3] == [b"# Title It was late. ", b"Who came? ", b"Nobody! "]
    assert said[-2:] == [b"2.5 kg. ", b"Ja "]
    assert found.around([b"a ", b"b "], 0, Draws(0)) == b"a b "
