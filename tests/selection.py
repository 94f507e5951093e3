"""What of the suite runs: hooks of pytest that deselect, so that what is skipped would be seen."""

import os
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.sampled import VARIABLE, chosen_day, in_turns

ON_GPU = os.environ.get("JAXBLT_TEST_GPU") == "1"
LONGEST = 28
"""Days in which each case of `slow(days=...)` has run: four weeks of a suite that runs each day."""
LONG = "long"
"""The group of tests of over 15 s of CPU, which begin first."""
MARKS = {"days", "group", "turn", "every"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run every case of the big matrices")
    written = "run every case of this test file that `slow(days=...)` rotates: it, or what it tests, was just written"
    parser.addoption("--written", action="append", default=[], help=written)


def pytest_configure(config: pytest.Config) -> None:
    # Keep worker processes, which inherit it, from starting on another day
    os.environ[VARIABLE] = chosen_day()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--slow"):
        day = f"{VARIABLE}={os.environ[VARIABLE]}"
        terminalreporter.write_line(f"of big matrices some cases ran: {day} runs them again, --slow runs all")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what cannot run here, and of big matrices what is not today's."""
    away = {item for item in items if _cannot_run(item)}
    if not config.getoption("--slow"):
        away |= set(of_other_days(items, config))
    config.hook.pytest_deselected(items=[item for item in items if item in away])
    items[:] = longest_first([item for item in items if item not in away])
    if (told := getattr(config, "workeroutput", None)) is not None:
        told["deselected"] = len(away)


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases with those files in front that have one of the group `LONG`.

    Of two processes one would else wait at the end for a file of minutes that the other began last.
    """
    groups = {item.nodeid: item.get_closest_marker("slow") and _options_of(item)["group"] for item in items}
    long = {nodeid.partition("::")[0] for nodeid, group in groups.items() if group == LONG}
    return sorted(items, key=lambda item: item.nodeid.partition("::")[0] not in long)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The summary of several processes counts what each of them deselected, once."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if "deselected" not in reporter.stats and (count := getattr(node, "workeroutput", {}).get("deselected")):
        node.config.hook.pytest_deselected(items=[node] * count)


def _cannot_run(item: pytest.Item) -> bool:
    """It needs more GPUs than there are, or a package, or that one is missing."""
    gpus = item.get_closest_marker("gpu")
    if gpus and _gpus() < gpus.kwargs.get("count", 1):
        return True
    return any(mark.args[0] is True for mark in item.iter_markers("skipif"))


def _gpus() -> int:
    if not ON_GPU:
        return 0
    import jax

    return jax.device_count()


def of_other_days(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Return the slow cases that `slow(days=...)` does not take today.

    Tests with one `group` take turns as if they were cases of one test, and a test without one has a case each day.
    Cases with one `turn` come together: they share what a fixture makes. Cases whose ids match a pattern of `every`
    run each day, and so do those in a file that the option `--written` names.

    Raises:
      UsageError: a pattern matches no case, a mark says what is not known, asks for more than `LONGEST` days, or for
        other days than its group.
    """
    matrices: dict[str, dict[str, list[pytest.Item]]] = {}
    options: dict[str, dict[str, Any]] = {}
    unmatched: dict[tuple[str, str], bool] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            continue
        test, said = item.nodeid.partition("[")[0], _options_of(item)
        matching = [pattern for pattern in said["every"] if fnmatchcase(_case_of(item), pattern)]
        if item.nodeid.partition("::")[0] in config.getoption("--written"):
            continue
        for pattern in said["every"]:
            unmatched[test, pattern] = unmatched.get((test, pattern), True) and pattern not in matching
        if not matching:
            name = said["group"] or test
            matrices.setdefault(name, {}).setdefault(said["turn"] or item.nodeid, []).append(item)
            if (days := options.setdefault(name, said)["days"]) != said["days"]:
                _refuse(
                    [f"{item.nodeid}: days={said['days']}, and others of {name!r} say {days}: say one number"]
                )
    if not any("::" in word for word in config.args):
        _refuse(
            [f"{test}: every={pattern!r} matches no case" for (test, pattern), no in unmatched.items() if no]
        )
    away: list[pytest.Item] = []
    for name, turns in matrices.items():
        days = options[name]["days"] if options[name]["group"] else min(options[name]["days"], len(turns))
        due = in_turns(list(turns), days, name, os.environ[VARIABLE])
        away += [item for turn, cases in turns.items() if turn not in due for item in cases]
    return away


def _options_of(item: pytest.Item) -> dict[str, Any]:
    """Return what all marks `slow` of a case say together."""
    found: dict[str, Any] = {"days": 0, "group": None, "turn": None, "every": ()}
    for mark in reversed(list(item.iter_markers("slow"))):
        found |= mark.kwargs
    if unknown := found.keys() - MARKS:
        _refuse([f"{item.nodeid}: slow() has no {', '.join(unknown)}, expected days=1 to {LONGEST}"])
    if not 1 <= found["days"] <= LONGEST:
        _refuse([f"{item.nodeid}: days={found['days']}, expected 1 to {LONGEST}"])
    every = found["every"]
    return found | {"every": (every,) if isinstance(every, str) else tuple(every)}


def _case_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise pytest.UsageError("; ".join(reasons))
