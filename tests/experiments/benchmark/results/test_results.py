"""docs/results.md and README's table are what the record says."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from experiments.benchmark.results import results
from experiments.benchmark.results.files import Folder, origins, read_folder

ROOT = Path(__file__).resolve().parents[4]
TEMPLATES = [(results.HERE / name).read_text(encoding="utf-8") for name in ("page.md", "readme.md")]


@pytest.fixture
def folder() -> Folder:
    return read_folder(ROOT / results.RECORD)


def test_the_page_and_the_table_are_what_the_record_says(folder: Folder) -> None:
    again = "run `python -m experiments.benchmark results`"
    assert (ROOT / results.PAGE).read_text(encoding="utf-8") == results.page(folder), again
    readme = (ROOT / results.README).read_text(encoding="utf-8")
    assert readme == results.with_table(readme, folder), again


def test_every_file_says_where_it_was_measured(folder: Folder) -> None:
    for name, found in folder.items():
        for device, jax, commit in origins(found):
            assert device, name
            assert jax[0].isdigit(), name
            assert len(commit.removesuffix("-dirty")) == 12, name


def test_every_file_is_on_the_page_or_in_a_note(folder: Folder) -> None:
    patterns = [
        name for head in re.findall(r"^```rows ([^;\n]*)", TEMPLATES[0], re.M) for name in head.split()
    ]
    texts = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("pallas_kernels/*/README.md")} - {ROOT / results.PAGE}
    notes = "".join(path.read_text(encoding="utf-8") for path in texts)
    unread = [
        name
        for name in folder
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
        if f"{name}." not in "".join(TEMPLATES) and f"{name}.json" not in notes
    ]
    # Studies of adapters have long names, which notes shorten.
    assert not [name for name in unread if f"_{name.rpartition('_')[2]}.json" not in notes], unread


def test_files_that_tables_name_are_there(folder: Folder) -> None:
    for head in re.findall(r"^```rows ([^;\n]*)", TEMPLATES[0], re.M):
        for pattern in head.split():
            assert any(fnmatchcase(name, pattern) for name in folder), pattern


def test_links_into_the_page_have_their_section() -> None:
    page = (ROOT / results.PAGE).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", page, re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("pallas_kernels/*/README.md")):
        named = re.findall(r"results\.md#([\w-]+)", path.read_text(encoding="utf-8"))
        assert set(named) <= anchors, path


def test_a_file_that_names_no_origin_is_an_error() -> None:
    with pytest.raises(ValueError, match="it needs all three"):
        origins({"devices": {"kind": "NVIDIA H200", "platform": "gpu"}, "versions": {"jax": "0.11.2"}})


def test_a_changed_figure_changes_the_page(folder: Folder) -> None:
    folder["books"]["evaluation"]["bits_per_byte"] = 1.5
    assert "| 1.500 |" in results.page(folder)
    readme = (ROOT / results.README).read_text(encoding="utf-8")
    assert "1.500 bits per byte" in results.with_table(readme, folder)


def test_a_readme_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="put both where the table belongs"):
        results.with_table("# jaxblt", {})
