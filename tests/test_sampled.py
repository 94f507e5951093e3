"""What of a big matrix runs on a day, and that what cannot run is deselected."""

import datetime
import os
import re
import subprocess
import sys
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis.internal.conjecture import providers

from tests.sampled import VARIABLE, chosen_day, in_turns, thinned
from tests.selection import longest_first, of_other_days

ROOT = Path(__file__).resolve().parents[1]


def test_a_day_repeats_itself_and_no_other() -> None:
    assert in_turns(range(90), 9, "a", "2026-11-29") == in_turns(range(90), 9, "a", "2026-11-29")
    assert in_turns(range(90), 9, "a", "2026-11-29") != in_turns(range(90), 9, "b", "2026-11-29")
    assert not set(in_turns(range(90), 9, "a", "2026-11-29")) & set(in_turns(range(90), 9, "a", "2026-11-30"))


@pytest.mark.parametrize(
    ("cases", "days", "sizes"), [(34, 26, {1, 2}), (7, 3, {2, 3}), (3, 8, {0, 1}), (8, 4, {2})]
)
def test_turns_are_spread_evenly_over_their_days(cases: int, days: int, sizes: set[int]) -> None:
    """No day has two cases more than another, and any so many days have each case once, over a year's end too."""
    begin = datetime.date(2026, 12, 20)
    dates = [(begin + datetime.timedelta(i)).isoformat() for i in range(days + 5)]
    by_day = [in_turns(range(cases), days, "matrix", date) for date in dates]
    assert set(map(len, by_day)) == sizes
    for i in range(len(by_day) - days):
        assert sorted(chain(*by_day[i : i + days])) == list(range(cases))


@pytest.mark.parametrize("day", ["2026-02-29", "2026", "next"])
def test_what_is_no_day_is_an_error(day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, day)
    with pytest.raises(ValueError, match=f"{VARIABLE}='{day}' is no day: expected one as 20"):
        chosen_day()


def test_a_thinned_matrix_keeps_pairs_of_values() -> None:
    """Twelve of 27 cases have all 27 pairs of three axes of three values."""
    matrix = list(product(range(3), repeat=3))
    chosen = thinned(matrix, 12, tuple)
    assert len(set(chosen)) == 12
    assert len({(i, j, case[i], case[j]) for case in chosen for i, j in ((0, 1), (0, 2), (1, 2))}) == 27
    assert sorted(thinned(matrix[:2], 12, tuple)) == matrix[:2]


def test_hypothesis_reads_no_module_for_constants() -> None:
    assert not providers._get_local_constants()


MATRIX = """
import pytest

def test_always(): pass

@pytest.mark.gpu
def test_on_a_gpu(): raise AssertionError

@pytest.mark.skipif(True, reason="cannot run here")
def test_what_cannot_run(): raise AssertionError

@pytest.mark.skipif(False, reason="can run here")
def test_what_can(): pass

@pytest.mark.slow(days=7)
@pytest.mark.parametrize("case", range(21))
def test_of_the_day(case): pass

@pytest.mark.slow(days=2, group="turns")
def test_one_of_two(): pass

@pytest.mark.slow(days=2, group="turns")
def test_the_other(): pass

@pytest.mark.parametrize("case", [1, *(pytest.param(i, marks=pytest.mark.slow(days=4)) for i in range(2, 10))])
def test_of_which_one_always_runs(case): pass

@pytest.mark.slow(days=7, every=("a-[12]", "b-1"))
@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("letter", "ab")
def test_with_a_base(letter, number): pass

@pytest.mark.slow(days=2, group="shared", turn="first")
def test_that_shares(): pass

@pytest.mark.slow(days=2, group="shared", turn="first")
def test_that_shares_too(): pass

@pytest.mark.slow(days=2, group="shared", turn="second")
@pytest.mark.parametrize("case", range(2))
def test_that_shares_something_else(case): pass
"""


@pytest.mark.slow(days=28, group="processes of their own")
def test_what_does_not_run_is_deselected_and_not_skipped(tmp_path: Path) -> None:
    """Over several processes too; the day is said, and runs the same cases again."""
    (tmp_path / "test_matrix.py").write_text(MATRIX, encoding="utf-8")
    options = ("-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "xdist", "-p", "tests.selection", "-rA")
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", VARIABLE))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    first, other = (
        subprocess.run([*command, *more], cwd=ROOT, env=env | day, capture_output=True, text=True)
        for more, day in (([], {}), (["-n", "2"], {VARIABLE: "2020-03-09"}))
    )
    for run in (first, other):
        assert "15 passed, 35 deselected" in run.stdout, run.stdout + run.stderr
        assert {f"test_with_a_base[{case}]" for case in ("a-1", "a-2", "b-1")} <= passed(run.stdout)
        assert re.search(rf"some cases ran: {VARIABLE}=20\d\d-\d\d-\d\d runs them again", run.stdout)
    assert f"{VARIABLE}=2020-03-09" in other.stdout
    assert passed(first.stdout) != passed(other.stdout)


def passed(said: str) -> set[str]:
    return set(re.findall(r"PASSED \S+::(\S+)", said))


def test_cases_of_one_turn_come_together() -> None:
    options = {"days": 2, "group": "shared"}
    items = [stand_in(f"{turn}.py::test_{name}", turn=turn, **options) for turn in "ab" for name in "xyz"]
    days = [due_in(day, items) for day in ("2026-11-29", "2026-11-30")]
    assert sorted(map(len, days)) == [3, 3]
    assert days[0] | days[1] == {item.nodeid for item in items}
    assert all(len({nodeid[0] for nodeid in due}) == 1 for due in days)


@pytest.mark.parametrize("days", range(1, 9))
def test_every_turn_comes_within_its_days(days: int) -> None:
    items = [stand_in(f"a.py::test_{i}", days=days, group="turns") for i in range(13)]
    due = set().union(*(due_in(f"2026-11-{10 + i}", items) for i in range(days)))
    assert due == {item.nodeid for item in items}


def test_a_group_has_one_number_of_days() -> None:
    items = [stand_in(f"a.py::test_{days}", days=days, group="turns") for days in (7, 28)]
    with pytest.raises(
        pytest.UsageError, match="test_28: days=28, and others of 'turns' say 7: say one number"
    ):
        due_in("2026-11-29", items)


@pytest.mark.parametrize(("group", "sizes"), [(None, {1}), ("turns", {0, 1})])
def test_a_test_without_a_group_has_a_case_each_day(group: str | None, sizes: set[int]) -> None:
    items = [stand_in(f"a.py::test[{i}]", days=6, group=group) for i in range(3)]
    due = [due_in(f"2026-11-{10 + i}", items) for i in range(6)]
    assert {len(cases) for cases in due} == sizes
    assert set().union(*due) == {item.nodeid for item in items}


def test_files_with_a_long_case_begin_first() -> None:
    groups = {"a.py": (None, "costly"), "b.py": ("costly", "long"), "c.py": ("costly",), "d.py": ("long",)}
    items = [
        stand_in(f"{file}::test_{i}", days=28, group=group)
        for file, found in groups.items()
        for i, group in enumerate(found)
    ]
    files = [item.nodeid.partition("::")[0] for item in longest_first(items)]
    assert files == ["b.py", "b.py", "d.py", "a.py", "a.py", "c.py"]


def test_all_cases_of_a_file_that_was_written_run() -> None:
    items = [stand_in(f"{file}.py::test_{i}", days=4, group="turns") for file in "ab" for i in range(4)]
    due = due_in("2026-11-29", items, written=("a.py",))
    assert {f"a.py::test_{i}" for i in range(4)} <= due
    assert len(due) == 4 + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"days": 29}, r"a.py::test\[0\]: days=29, expected 1 to 28"),
        ({}, r"a.py::test\[0\]: days=0, expected 1 to 28"),
        ({"weeks": 4}, r"a.py::test\[0\]: slow\(\) has no weeks, expected days=1 to 28"),
        ({"days": 4, "every": "30"}, r"a.py::test: every='30' matches no case"),
    ],
)
def test_unknown_turns_and_a_base_that_is_missing_are_errors(options: dict[str, Any], said: str) -> None:
    items = [stand_in(f"a.py::test[{i}]", **options) for i in range(20)]
    with pytest.raises(pytest.UsageError, match=said):
        due_in("2026-11-29", items)


def stand_in(nodeid: str, **options: Any) -> Any:
    """A case with one mark `slow`."""
    mark = pytest.mark.slow(**options).mark
    return SimpleNamespace(
        nodeid=nodeid, iter_markers=lambda name: [mark], get_closest_marker=lambda name: mark
    )


def due_in(day: str, items: list[Any], *, written: tuple[str, ...] = ()) -> set[str]:
    config: Any = SimpleNamespace(args=["tests"], getoption=lambda name: list(written))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, day)
        away = {id(item) for item in of_other_days(items, config)}
    return {item.nodeid for item in items if id(item) not in away}
