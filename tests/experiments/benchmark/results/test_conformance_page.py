"""The page of conformance is what its record says, and our layers have no finding."""

from html import escape
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.results.conformance_page import (
    OURS,
    PAGE,
    PICTURE,
    RECORD,
    in_order,
    pages,
    properties,
)
from experiments.benchmark.results.conformance_picture import state_of
from experiments.benchmark.results.files import Figures, read_folder

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def subjects() -> list[Figures]:
    return in_order(list(read_folder(ROOT / RECORD).values()))


def test_page_and_picture_are_what_the_record_says() -> None:
    for name, text in pages(ROOT).items():
        assert (ROOT / name).read_text("utf-8") == text, (
            f"run python -m experiments.benchmark conformance_page: {name}"
        )


def test_each_layer_is_on_the_page_and_in_the_picture_once(subjects: list[Figures]) -> None:
    names = [each["name"] for each in subjects]
    assert len(names) == len(set(names))
    page, picture = ((ROOT / name).read_text("utf-8") for name in (PAGE, PICTURE))
    assert not [name for name in names if f"| {name} |" not in page]
    assert not [
        each["name"] for each in subjects if each["outcomes"] and f">{escape(each['name'])}<" not in picture
    ]


def test_properties_are_those_of_today(subjects: list[Figures]) -> None:
    assert {name for each in subjects for name in each["outcomes"]} <= {*properties()}


def test_each_finding_was_shown_by_its_script_and_ours_have_none(subjects: list[Figures]) -> None:
    found: list[tuple[str, Any]] = [
        (each["name"], outcome)
        for each in subjects
        for outcome in each["outcomes"].values()
        if state_of(outcome) == "fails"
    ]
    assert not [name for name, outcome in found if outcome["reproduced"] < 2]
    assert not [name for name, _ in found if name.startswith(OURS)]
    assert all("jaxblt" not in outcome["script"] for _, outcome in found)
