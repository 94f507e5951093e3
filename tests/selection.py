"""What of the suite runs: hooks of pytest that deselect, so that what is skipped would be seen."""

import os
from typing import Any

import pytest

from tests.sampled import VARIABLE, chosen_week, sampled

ON_GPU = os.environ.get("JAXBLT_TEST_GPU") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run every case of the big matrices")


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
        away |= _of_other_weeks(items)
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


def _of_other_weeks(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test's slow cases those that `slow(weekly=...)` does not take this week.

    Tests with one `group` take turns as if they were cases of one test.
    """
    slow: dict[str, list[pytest.Item]] = {}
    for item in items:
        if "slow" in item.keywords:
            groups = [mark.kwargs["group"] for mark in item.iter_markers("slow") if "group" in mark.kwargs]
            slow.setdefault((groups or [item.nodeid.partition("[")[0]])[0], []).append(item)
    away: set[pytest.Item] = set()
    for test, cases in slow.items():
        weekly = max(mark.kwargs.get("weekly", 0) for mark in cases[0].iter_markers("slow"))
        due = sampled(cases, weekly, test, os.environ[VARIABLE])
        away |= set(cases) - set(due)
    return away
