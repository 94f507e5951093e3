"""What of a big matrix runs in a week, and that what cannot run is deselected."""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sampled import VARIABLE, chosen_week, in_turns, number_of, sampled
from tests.selection import of_other_weeks

ROOT = Path(__file__).resolve().parents[1]


def test_weeks_that_follow_each_other_have_all_cases_each_once() -> None:
    weeks = [f"2026-W{week:02d}" for week in (51, 52, 53)] + ["2027-W01"]
    found = [case for week in weeks for case in sampled(range(12), 3, "matrix", week)]
    assert sorted(found) == list(range(12))
    assert found != sorted(found)


def test_a_week_repeats_itself_and_no_other() -> None:
    assert sampled(range(90), 4, "a", "2026-W40") == sampled(range(90), 4, "a", "2026-W40")
    assert sampled(range(90), 4, "a", "2026-W40") != sampled(range(90), 4, "b", "2026-W40")
    assert not set(sampled(range(90), 4, "a", "2026-W40")) & set(sampled(range(90), 4, "a", "2026-W41"))
    assert sorted(sampled(range(3), 4, "a", "2026-W40")) == [0, 1, 2]
    assert not sampled(range(3), 0, "a", "2026-W40")


@pytest.mark.parametrize(
    ("cases", "weeks", "sizes"), [(34, 26, {1, 2}), (7, 3, {2, 3}), (3, 8, {1}), (8, 4, {2})]
)
def test_turns_are_spread_evenly_over_their_weeks(cases: int, weeks: int, sizes: set[int]) -> None:
    """No week has two cases more than another, and any so many weeks have each case once."""
    by_week = [in_turns(range(cases), weeks, "matrix", f"2026-W{10 + i}") for i in range(weeks + 5)]
    assert set(map(len, by_week)) == sizes
    period = min(weeks, cases)
    for begin in range(len(by_week) - period):
        assert sorted(chain(*by_week[begin : begin + period])) == list(range(cases))


def test_weeks_follow_each_other_over_the_year() -> None:
    assert number_of("2027-W01") == number_of("2026-W53") + 1 == number_of("2026-W52") + 2


@pytest.mark.parametrize("week", ["2026-W54", "2026", "next", "2025-W53"])
def test_what_is_no_week_is_an_error(week: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, week)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{week}' is no week: expected one as 20"):
        chosen_week()


MATRIX = """
import pytest

def test_always(): pass

@pytest.mark.gpu
def test_on_a_gpu(): raise AssertionError

@pytest.mark.skipif(True, reason="cannot run here")
def test_what_cannot_run(): raise AssertionError

@pytest.mark.skipif(False, reason="can run here")
def test_what_can(): pass

@pytest.mark.slow(weekly=3)
@pytest.mark.parametrize("case", range(20))
def test_of_the_week(case): pass

@pytest.mark.slow
def test_slow(): raise AssertionError

@pytest.mark.slow(weekly=1, group="turns")
def test_one_of_two(): pass

@pytest.mark.slow(weekly=1, group="turns")
def test_the_other(): pass

@pytest.mark.parametrize("case", [1, *(pytest.param(i, marks=pytest.mark.slow(weekly=2)) for i in range(2, 9))])
def test_of_which_one_always_runs(case): pass

@pytest.mark.slow(weeks=7, every=("a-[12]", "b-1"))
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("letter", "ab")
def test_with_a_base(letter, number): pass

@pytest.mark.slow(weeks=2, group="shared", turn="first")
def test_that_shares(): pass

@pytest.mark.slow(weeks=2, group="shared", turn="first")
def test_that_shares_too(): pass

@pytest.mark.slow(weeks=2, group="shared", turn="second")
@pytest.mark.parametrize("case", range(2))
def test_that_shares_something_else(case): pass
"""


def test_what_does_not_run_is_deselected_and_not_skipped(tmp_path: Path) -> None:
    """Over several processes too; the week is said, and runs the same cases again."""
    (tmp_path / "test_matrix.py").write_text(MATRIX, encoding="utf-8")
    options = ("-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "xdist", "-p", "tests.selection", "-rA")
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", VARIABLE))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    first, other = (
        subprocess.run([*command, *more], cwd=ROOT, env=env | week, capture_output=True, text=True)
        for more, week in (([], {}), (["-n", "2"], {VARIABLE: "2020-W11"}))
    )
    for run in (first, other):
        assert "15 passed, 34 deselected" in run.stdout, run.stdout + run.stderr
        assert {f"test_with_a_base[{case}]" for case in ("a-1", "a-2", "b-1")} <= passed(run.stdout)
        assert re.search(rf"some cases ran: {VARIABLE}=20\d\d-W\d\d runs them again", run.stdout)
    assert f"{VARIABLE}=2020-W11" in other.stdout
    assert passed(first.stdout) != passed(other.stdout)


def passed(said: str) -> set[str]:
    return set(re.findall(r"PASSED \S+::(\S+)", said))


def test_cases_of_one_turn_come_together() -> None:
    options = {"weeks": 2, "group": "shared"}
    items = [stand_in(f"{turn}.py::test_{name}", turn=turn, **options) for turn in "ab" for name in "xyz"]
    weeks = [due_in(week, items) for week in ("2026-W40", "2026-W41")]
    assert sorted(map(len, weeks)) == [3, 3]
    assert weeks[0] | weeks[1] == {item.nodeid for item in items}
    assert all(len({nodeid[0] for nodeid in due}) == 1 for due in weeks)


@pytest.mark.parametrize("weeks", range(1, 9))
def test_every_turn_comes_within_its_weeks(weeks: int) -> None:
    items = [stand_in(f"a.py::test_{i}", weeks=weeks, group="turns") for i in range(13)]
    due = set().union(*(due_in(f"2026-W{20 + i}", items) for i in range(weeks)))
    assert due == {item.nodeid for item in items}


def test_all_cases_of_a_file_that_was_written_run_except_those_of_matrices() -> None:
    items = [stand_in(f"{file}.py::test_{i}", weeks=4, group="turns") for file in "ab" for i in range(4)]
    items += [stand_in(f"a.py::test_matrix[{i}]", weekly=1) for i in range(4)]
    due = due_in("2026-W40", items, written=("a.py",))
    assert {f"a.py::test_{i}" for i in range(4)} <= due
    assert len(due) == 4 + 1 + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weeks": 27}, r"a.py::test: weeks=27, expected at most 26"),
        ({"weeks": 4, "every": "30"}, r"a.py::test: every='30' matches no case"),
    ],
)
def test_too_many_weeks_and_a_base_that_is_missing_are_errors(options: dict[str, Any], said: str) -> None:
    items = [stand_in(f"a.py::test[{i}]", **options) for i in range(20)]
    with pytest.raises(pytest.UsageError, match=said):
        due_in("2026-W40", items)


def stand_in(nodeid: str, **options: Any) -> Any:
    """A case with one mark `slow`."""
    mark = pytest.mark.slow(**options).mark
    return SimpleNamespace(
        nodeid=nodeid, iter_markers=lambda name: [mark], get_closest_marker=lambda name: mark
    )


def due_in(week: str, items: list[Any], *, written: tuple[str, ...] = ()) -> set[str]:
    config: Any = SimpleNamespace(args=["tests"], getoption=lambda name: list(written))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, week)
        away = {id(item) for item in of_other_weeks(items, config)}
    return {item.nodeid for item in items if id(item) not in away}
