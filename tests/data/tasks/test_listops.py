"""ListOps: the evaluator on expressions worked out by hand, and the arena's files."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxblt.data import OFFSET
from jaxblt.data.draws import Draws
from jaxblt.data.examples import Examples
from jaxblt.data.tasks import ListOps, ListOpsFiles, listops
from jaxblt.data.tasks.listops import evaluate, is_whole, parse, reorder, show
from jaxblt.data.tasks.listops_files import check_answers, read_tsv, write_files
from jaxblt.evaluation.tasks.baseline import majority_baseline

RELEASED = os.environ.get("JAXBLT_LISTOPS_D20S", "")
"""`test_d20s.tsv` of Nangia and Bowman, with 10,000 expressions; also `.xz`."""
GOLDEN = (
    ("7", 7),
    ("( ( ( [MAX 2 ) 9 ) ] )", 9),
    ("( ( ( ( ( [SM 6 ) 5 ) 9 ) 0 ) ] )", 0),
    ("( ( ( ( ( [MIN 6 ) 3 ) 5 ) 1 ) ] )", 1),
    ("( ( ( ( [MED 8 ) 1 ) 3 ) ] )", 3),
    ("( ( ( [MED 8 ) 1 ) ] )", 4),  # 4.5, truncated
    ("( ( ( ( ( [MED 9 ) 0 ) 3 ) 4 ) ] )", 3),
    ("( ( ( ( [MAX ( ( ( [SM 9 ) 9 ) ] ) ) ( ( ( ( [MED 7 ) 5 ) 6 ) ] ) ) 2 ) ] )", 8),
    ("( ( ( [MIN ( ( ( [MAX 3 ) ( ( ( [SM 8 ) 7 ) ] ) ) ] ) ) 6 ) ] )", 5),
    ("( ( [SM ( ( [SM ( ( [SM 4 ) ] ) ) ] ) ) ] )", 4),
)


@pytest.mark.parametrize(("text", "value"), GOLDEN)
def test_expressions_worked_out_by_hand(text, value):
    assert evaluate(parse(text)) == value
    assert parse(show(parse(text))) == parse(text)


@pytest.mark.skipif(not RELEASED, reason="the file has no licence to be shipped under")
def test_every_released_expression_comes_to_its_answer():
    file = Path(RELEASED)
    questions, answers = read_tsv(file)
    assert len(questions) == 10_000
    check_answers(file, questions, answers, most=len(questions))


@pytest.mark.parametrize("text", ["", "3 4", "[MAX 3", "[MAX ]", "3 ]", "[SM 1 ] ]", "[SM 1 ] 2"])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError, match="expression"):
        evaluate(parse(text))


def test_an_unknown_word_is_named():
    with pytest.raises(ValueError, match=r"'\[MUL' is no symbol of ListOps"):
        parse("( ( [MUL 3 ) ] )")


@pytest.mark.parametrize("swapped", [False, True], ids=["arena", "spinn"])
def test_released_files_are_read(tmp_path, swapped):
    rows = [("Source", "Target"), *((text, str(value)) for text, value in GOLDEN)]
    lines = ["\t".join(row[::-1] if swapped else row) for row in rows]
    (tmp_path / "basic_val.tsv").write_text("\n".join(lines) + "\n")
    examples = ListOpsFiles(path=str(tmp_path), max_symbols=6).open("validation")
    assert examples.count == len(GOLDEN)
    for number, (text, value) in enumerate(GOLDEN):
        inputs, targets, scored = examples.example(number)
        assert (inputs[1:-1] - OFFSET).tolist() == parse(text)[:6]
        assert targets[scored].tolist() == [OFFSET + value]
    with pytest.raises(FileNotFoundError, match=r"basic_train\.tsv"):
        ListOpsFiles(path=str(tmp_path)).open("train")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Source\tLabel\n1\t1\n", "expected the columns Source and Target"),
        ("Source\tTarget\n( [MAX 2 ] )\t12\n", "line 2: .*expected an expression and a digit"),
        ("Source\tTarget\n7\t7\n( [MUL 2 ] )\t2\n", "line 3: .*is no symbol"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, said):
    (tmp_path / "basic_test.tsv").write_text(text)
    with pytest.raises(ValueError, match=said):
        ListOpsFiles(path=str(tmp_path)).open("test")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("( [MAX 2 ] )\t3\n", "line 3: its expression comes to 2, its answer is 3"),
        ("( [MAX 2\t2\n", "line 3: not one whole expression"),
        ("7 ]\t7\n", "line 3: unbalanced expression"),
    ],
)
def test_an_answer_that_is_not_the_expression_s_is_named(tmp_path, text, said):
    (tmp_path / "basic_test.tsv").write_text(f"Source\tTarget\n7\t7\n{text}")
    with pytest.raises(ValueError, match=said):
        ListOpsFiles(path=str(tmp_path)).open("test")


def test_of_many_expressions_some_are_evaluated(tmp_path):
    lines = ["7\t7\n"] * 4 + ["7\t3\n"]
    (tmp_path / "basic_val.tsv").write_text("".join(["Source\tTarget\n", *lines]))
    questions, answers = read_tsv(tmp_path / "basic_val.tsv")
    with pytest.raises(ValueError, match="line 6: its expression comes to 7, its answer is 3"):
        check_answers(tmp_path / "basic_val.tsv", questions, answers, most=2)
    check_answers(tmp_path / "basic_val.tsv", questions, answers, most=1)


def test_files_without_expressions_and_without_text_are_refused(tmp_path):
    (tmp_path / "basic_val.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ValueError, match=r"basic_val\.tsv' gives no example for split 'validation'"):
        ListOpsFiles(path=str(tmp_path)).open("validation")
    (tmp_path / "basic_val.tsv").write_bytes(b"Source\tTarget\n\xff\t3\n")
    with pytest.raises(ValueError, match=r"basic_val\.tsv' is no text .*: copy it again"):
        ListOpsFiles(path=str(tmp_path)).open("validation")


def test_reordered_arguments_come_to_the_same_digit():
    draws, task = Draws(3), ListOps(min_symbols=4, max_symbols=60)
    for _ in range(50):
        symbols = task.expression(draws)
        other = reorder(np.array(symbols), draws).tolist()
        assert evaluate(other) == evaluate(symbols)
        assert sorted(other) == sorted(symbols)
    argument, nested = [*range(8)], [11, 8, 9, 14]
    places = set()
    for _ in range(20):
        other = reorder(np.array([10, *argument, *nested, 14]), draws).tolist()
        assert other[0] == 10
        start = other.index(11)
        assert set(other[start : start + 4]) == set(nested)
        places.add(start)
    assert len(places) > 4
    again = [reorder(np.array(symbols), Draws(5)) for _ in range(2)]
    np.testing.assert_array_equal(*again)


@pytest.mark.slow(days=28, group="costly")
def test_arguments_come_in_every_order_equally_often():
    """Of lists at any depth: 3! orders of the first times 2 of the second times 3! of the third."""
    symbols = np.array(parse("[MAX 1 [MIN 2 [SM 3 4 5 ] ] 6 ]"), np.uint8)
    draws, count = Draws(11), 7200
    found = Counter(reorder(symbols, draws).tobytes() for _ in range(count))
    assert len(found) == 72
    expected = count / 72
    # Chi squared with 71 degrees of freedom is above 120 in two of 10,000 cases.
    assert sum((times - expected) ** 2 / expected for times in found.values()) < 120


def test_a_length_between_those_of_expressions_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arguments of an operator: 4, 7 and 10 symbols, no 8."""
    monkeypatch.setattr(listops, "MOST_DRAWN", 100)
    task = ListOps(max_depth=3, max_args=2, min_symbols=8, max_symbols=8)
    with pytest.raises(ValueError, match=r"no expression of 8\.\.8 symbols among 100: widen min_symbols"):
        task.open("train").example(0)


def test_training_expressions_are_shown_in_several_orders(tmp_path):
    write_files(ListOps(train_size=5, eval_size=2, min_symbols=12, max_symbols=40), tmp_path, processes=1)
    once, often = (ListOpsFiles(path=str(tmp_path), orders=orders, max_symbols=20) for orders in (1, 4))
    plain, examples = once.open("train"), often.open("train", seed=7)
    assert examples.count == 20
    np.testing.assert_array_equal(examples.lengths, np.tile(plain.lengths, 4))
    shown = [set() for _ in range(5)]
    for number in range(20):
        inputs, targets, scored = examples.example(number)
        expected, answer, _ = plain.example(number % 5)
        assert len(inputs) == len(expected)
        np.testing.assert_array_equal(targets[scored], answer[scored])
        shown[number % 5].add(inputs.tobytes())
        if number < 5:
            np.testing.assert_array_equal(inputs, expected)
    assert all(len(rows) > 1 for rows in shown)
    again, other = often.open("train", seed=7), often.open("train", seed=8)
    same = [np.array_equal(examples.example(n)[0], again.example(n)[0]) for n in range(20)]
    differ = [not np.array_equal(examples.example(n)[0], other.example(n)[0]) for n in range(5, 20)]
    assert all(same)
    assert any(differ)
    assert often.open("test").count == 2
    assert isinstance(examples, Examples)
    assert majority_baseline(often).accuracy == majority_baseline(once).accuracy
    with pytest.raises(IndexError, match="example 20 does not exist: there are 20"):
        examples.example(20)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("7", True),
        ("[MAX 2 9 ]", True),
        ("[MAX [SM 1 ] ]", True),
        ("[MAX 2", False),
        ("2 ]", False),
        ("1 2", False),
        ("[MAX 2 ] 3", False),
        ("] [MAX", False),
        ("", False),
        ("[MAX ]", False),
        ("[MAX 1 [SM ] ]", False),
    ],
)
def test_whole_expressions_are_told_from_others(text, whole):
    assert is_whole(np.array(parse(text), int)) == whole


def test_brackets_of_every_expression_that_is_reordered_are_checked(tmp_path):
    lines = ["7\t7\n"] * 2 + ["( [MAX 2\t2\n"] + ["7\t7\n"] * 4000
    (tmp_path / "basic_train.tsv").write_text("".join(["Source\tTarget\n", *lines]))
    assert ListOpsFiles(path=str(tmp_path)).open("train").count == 4003
    with pytest.raises(ValueError, match="line 4: not one whole expression"):
        ListOpsFiles(path=str(tmp_path), orders=2).open("train")


def test_drawn_files_hold_the_examples_of_the_task(tmp_path):
    task = ListOps(train_size=3, eval_size=2, min_symbols=4, max_symbols=40)
    write_files(task, tmp_path, processes=1)
    for split, count in (("train", 3), ("validation", 2), ("test", 2)):
        written, drawn = ListOpsFiles(path=str(tmp_path)).open(split), task.open(split)
        assert written.count == count
        for number in range(count):
            for read, expected in zip(written.example(number), drawn.example(number), strict=True):
                np.testing.assert_array_equal(read, expected)
    with pytest.raises(ValueError, match="train_size"):
        write_files(ListOps(), tmp_path)
