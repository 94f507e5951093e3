"""The pages of results and README's table are what the record says."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from experiments.benchmark.results import results
from experiments.benchmark.results.files import Folder, origins, read_folder

ROOT = Path(__file__).resolve().parents[4]
TABLES = "".join((results.HERE / name).read_text(encoding="utf-8") for name in ("page.md", "details.md"))
SENTENCES = (results.HERE / "readme.md").read_text(encoding="utf-8")
NAMED = [name for head in re.findall(r"^```rows ([^;\n]*)", TABLES, re.M) for name in head.split()]
PAGES = (results.PAGE, results.DETAILS)


@pytest.fixture
def folder() -> Folder:
    return read_folder(ROOT / results.RECORD)


def test_the_page_and_the_table_are_what_the_record_says(folder: Folder) -> None:
    again = "run `python -m experiments.benchmark results`"
    for path, text in zip(PAGES, (results.page(folder), results.details(folder)), strict=True):
        assert (ROOT / path).read_text(encoding="utf-8") == text, again
    readme = (ROOT / results.README).read_text(encoding="utf-8")
    assert readme == results.with_table(readme, folder), again


def test_every_file_says_where_it_was_measured(folder: Folder) -> None:
    for name, found in folder.items():
        for device, jax, commit in origins(found):
            assert device, name
            assert jax[0].isdigit(), name
            assert len(commit.removesuffix("-dirty")) == 12, name


def test_every_file_is_on_the_page_or_in_a_note(folder: Folder) -> None:
    texts = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("pallas_kernels/*/README.md")}
    texts -= {ROOT / path for path in PAGES}
    notes = "".join(path.read_text(encoding="utf-8") for path in texts)
    unread = [
        name
        for name in folder
        if not any(fnmatchcase(name, pattern) for pattern in NAMED)
        if f"{name}." not in TABLES + SENTENCES and f"{name}.json" not in notes
    ]
    # Studies of adapters have long names, which notes shorten.
    assert not [name for name in unread if f"_{name.rpartition('_')[2]}.json" not in notes], unread


def test_files_that_tables_name_are_there(folder: Folder) -> None:
    for pattern in NAMED:
        assert any(fnmatchcase(name, pattern) for name in folder), pattern


def test_links_into_the_pages_have_their_section() -> None:
    titles = [re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.M) for path in PAGES]
    anchors = {
        Path(path).name: {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}
        for path, found in zip(PAGES, titles, strict=True)
    }
    for path in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("pallas_kernels/*/README.md")):
        for page, anchor in re.findall(r"(results[\w-]*\.md)#([\w-]+)", path.read_text(encoding="utf-8")):
            assert anchor in anchors[page], path


def test_the_first_page_has_one_table_a_subject_and_no_measurement_twice() -> None:
    sections = (ROOT / results.PAGE).read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(sections) < 15
    for section in sections:
        rows = re.findall(r"^\|.*$", section, re.M)
        assert section.count("\n| --- ") == 1
        assert len(rows) == len(set(rows)) <= 20


def test_a_file_that_names_no_origin_is_an_error() -> None:
    with pytest.raises(ValueError, match="it needs all three"):
        origins({"devices": {"kind": "NVIDIA H200", "platform": "gpu"}, "versions": {"jax": "0.11.2"}})


def test_a_changed_figure_changes_the_page(folder: Folder) -> None:
    folder["books"]["evaluation"]["bits_per_byte"] = 1.5
    assert "| 1.500 |" in results.page(folder)
    readme = (ROOT / results.README).read_text(encoding="utf-8")
    assert "1.500, 1.632" in results.with_table(readme, folder)


def test_a_readme_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="put both where the table belongs"):
        results.with_table("# jaxblt", {})
