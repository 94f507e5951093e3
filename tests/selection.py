"""What of the suite runs: hooks of pytest that deselect, so that what is skipped would be seen."""

import os
from fnmatch import fnmatchcase
from typing import Any

import pytest

from tests.sampled import VARIABLE, chosen_week, in_turns, sampled

ON_GPU = os.environ.get("JAXBLT_TEST_GPU") == "1"
LONGEST = 26
"""Weeks in which each case of `slow(weeks=...)` has run; of bigger matrices `slow(weekly=...)` takes samples."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run every case of the big matrices")
    written = (
        "run every case of this test file that `slow(weeks=...)` rotates: it has not run since it was written"
    )
    parser.addoption("--written", action="append", default=[], help=written)


def pytest_configure(config: pytest.Config) -> None:
    # worker processes inherit it: none of them starts in another week
    os.environ[VARIABLE] = chosen_week()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--slow"):
        week = f"{VARIABLE}={os.environ[VARIABLE]}"
        terminalreporter.write_line(
            f"of big matrices some cases ran: {week} runs them again, --slow runs all"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what cannot run here, and of big matrices what is not this week's."""
    away = {item for item in items if _cannot_run(item)}
    if not config.getoption("--slow"):
        away |= set(of_other_weeks(items, config))
    config.hook.pytest_deselected(items=[item for item in items if item in away])
    items[:] = [item for item in items if item not in away]
    if (told := getattr(config, "workeroutput", None)) is not None:
        told["deselected"] = len(away)


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


def of_other_weeks(items: list[pytest.Item], config: pytest.Config) -> list[pytest.Item]:
    """Of each test's slow cases those that `slow(weekly=...)` or `slow(weeks=...)` does not take this week.

    Tests with one `group` take turns as if they were cases of one test. Cases with one `turn` come together: they share
    what a fixture makes. Cases whose ids match a pattern of `every` run each week, and so do those of `weeks` in a file
    that the option `--written` names.

    Raises:
      UsageError: a pattern matches no case, or a matrix asks for more than `LONGEST` weeks.
    """
    matrices: dict[str, dict[str, list[pytest.Item]]] = {}
    options: dict[str, dict[str, Any]] = {}
    unmatched: dict[tuple[str, str], bool] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            continue
        test, said = item.nodeid.partition("[")[0], _options_of(item)
        matching = [pattern for pattern in said["every"] if fnmatchcase(_case_of(item), pattern)]
        if said["weeks"] and item.nodeid.partition("::")[0] in config.getoption("--written"):
            continue
        for pattern in said["every"]:
            unmatched[test, pattern] = unmatched.get((test, pattern), True) and pattern not in matching
        if not matching:
            name = said["group"] or test
            matrices.setdefault(name, {}).setdefault(said["turn"] or item.nodeid, []).append(item)
            options.setdefault(name, said)
    if not any("::" in word for word in config.args):
        _refuse(
            [f"{test}: every={pattern!r} matches no case" for (test, pattern), no in unmatched.items() if no]
        )
    away: list[pytest.Item] = []
    for name, turns in matrices.items():
        due = _due(list(turns), options[name], name)
        away += [item for turn, cases in turns.items() if turn not in due for item in cases]
    return away


def _options_of(item: pytest.Item) -> dict[str, Any]:
    """What all marks `slow` of a case say together."""
    found: dict[str, Any] = {"weekly": 0, "weeks": 0, "group": None, "turn": None, "every": ()}
    for mark in reversed(list(item.iter_markers("slow"))):
        found |= mark.kwargs
    every = found["every"]
    return found | {"every": (every,) if isinstance(every, str) else tuple(every)}


def _case_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[2].removesuffix("]")


def _due(turns: list[str], options: dict[str, Any], name: str) -> list[str]:
    """Those of a matrix's turns that this week takes.

    Raises:
      UsageError: it asks for more than `LONGEST` weeks.
    """
    if options["weeks"] > LONGEST:
        _refuse([f"{name}: weeks={options['weeks']}, expected at most {LONGEST}"])
    week = os.environ[VARIABLE]
    if options["weeks"]:
        return in_turns(turns, options["weeks"], name, week)
    return sampled(turns, options["weekly"], name, week)


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise pytest.UsageError("; ".join(reasons))
