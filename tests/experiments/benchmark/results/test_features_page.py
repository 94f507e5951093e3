"""The page of features is what its record says, and what it names exists."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from experiments.benchmark.__main__ import BENCHMARKS
from experiments.benchmark.results.features_page import PAGE, page, read_systems, state_of
from jaxblt.cli.main import COMMANDS

ROOT = Path(__file__).parents[4]
COMMAND = re.compile(r"(python -m experiments\.benchmark|jaxblt) (\w+)")


@pytest.fixture(scope="module")
def systems() -> list[dict[str, Any]]:
    return read_systems(ROOT)


@pytest.fixture(scope="module")
def features(systems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [feature for system in systems for feature in system["features"]]


def cases_of(path: Path) -> set[str]:
    """Return the tests that stand at the top of a file, without running it."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_page_is_what_the_record_says(systems: list[dict[str, Any]]) -> None:
    written = (ROOT / PAGE).read_text(encoding="utf-8")
    assert written == page(systems), "run python -m experiments.benchmark features_page"


def test_each_feature_has_one_row_and_all_that_its_state_needs(features: list[dict[str, Any]]) -> None:
    ids = [feature["id"] for feature in features]
    assert len(ids) == len(set(ids))
    for feature in features:
        known, state = {"id", "what"}, state_of(feature)
        known |= {"yes": {"where", "shown_by"}, "part": {"where", "shown_by", "lacks"}, "no": set()}.get(
            state, {"shown_by", "loses"}
        )
        assert known <= feature.keys() <= known | ({"where"} if state == "loses" else set()), feature


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/results/test_features_page")
def test_every_name_is_imported(features: list[dict[str, Any]]) -> None:
    names = sorted({name for feature in features for name in feature.get("where", ())})
    assert names
    assert all(resolve_name(name) is not None for name in names)


def test_every_test_command_and_file_exists(features: list[dict[str, Any]]) -> None:
    shown = {feature["shown_by"] for feature in features if "shown_by" in feature}
    cases: dict[str, set[str]] = {}
    for command in shown:
        file, _, case = command.partition("::")
        if case:
            cases.setdefault(file, set()).add(case)
            continue
        if command.startswith("experiments/results/"):
            assert (ROOT / command).is_file(), command
            continue
        found = COMMAND.fullmatch(command)
        assert found is not None, command
        assert found[2] in (COMMANDS if found[1] == "jaxblt" else BENCHMARKS), command
    assert not {file: lost for file, names in cases.items() if (lost := names - cases_of(ROOT / file))}
