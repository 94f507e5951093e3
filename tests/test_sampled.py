"""What of a big matrix runs in a week, and that what cannot run is deselected."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampled import VARIABLE, chosen_week, number_of, sampled

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
        assert "9 passed, 26 deselected" in run.stdout, run.stdout + run.stderr
        assert re.search(rf"some cases ran: {VARIABLE}=20\d\d-W\d\d runs them again", run.stdout)
    assert f"{VARIABLE}=2020-W11" in other.stdout
    assert passed(first.stdout) != passed(other.stdout)


def passed(said: str) -> set[str]:
    return set(re.findall(r"PASSED \S+::(\S+)", said))
