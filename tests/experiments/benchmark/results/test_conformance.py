"""The page of conformance has the figures of its files, and our layers have no finding."""

from html import escape
from pathlib import Path

import pytest

from experiments.benchmark.results.files import Figures, read_folder
from jaxblt.testing.conformance import PROPERTIES

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def subjects() -> list[Figures]:
    files = read_folder(ROOT / "experiments" / "results" / "conformance").values()
    return [each for file in files for each in file["subjects"]]


def test_each_layer_is_on_the_page_and_in_the_picture_once(subjects: list[Figures]) -> None:
    page, picture = ((ROOT / "docs" / f"conformance.{kind}").read_text("utf-8") for kind in ("md", "svg"))
    for each in subjects:
        outcomes, name = each["outcomes"], each["name"]
        failed = ", ".join(found.replace("_", " ") for found, told in outcomes.items() if "script" in told)
        limit = max(told["limit"] for found, told in outcomes.items() if found != "gradients")
        figures = f"{len(outcomes)} of {len(PROPERTIES)} | {limit:.1e}"
        said = f"**{failed}**" if failed else "nothing"
        row = f"| {name} | {each['version']} | {each['dtype']} | {figures} | {said} |\n"
        assert page.count(row) == picture.count(f">{escape(name)}<") == 1, name


def test_each_finding_was_shown_by_its_script_and_ours_have_none(subjects: list[Figures]) -> None:
    found = [
        (each["name"], told) for each in subjects for told in each["outcomes"].values() if "script" in told
    ]
    assert not [name for name, told in found if told["reproduced"] < 2 or name.startswith("jaxblt")]
    assert all("jaxblt" not in told["script"] for _, told in found)
