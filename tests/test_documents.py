"""README's example runs, documents are short, their links lead somewhere, and what they name exists."""

import contextlib
import io
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import configs
from jaxblt.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LONGEST = {"README.md": 120, "CONTRIBUTING.md": 150, "docs/known-limits.md": 150}

each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_example_prints_what_readme_says() -> None:
    code, said = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert len(code.splitlines()) <= 22
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == said


@pytest.mark.parametrize(("name", "lines"), LONGEST.items())
def test_documents_are_read_in_minutes(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


def test_the_changelog_has_a_line_a_change_and_each_part_once_a_version() -> None:
    for version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        lines = version.splitlines()
        parts = [line for line in lines if line.startswith("### ")]
        assert len(parts) == len(set(parts))
        assert not [line for line in lines if len(line) > 150 or line.startswith(" ")]


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing, f"{path.relative_to(ROOT)} links to {missing}"


@each_document
def test_commands_name_modules_and_tests_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:experiments|jaxblt)[\w.]*)", text))
    assert not [name for name in modules if find_spec(name) is None]
    tests = set(re.findall(r"\btests/[\w/]+\.py", text))
    assert not [name for name in tests if not (ROOT / name).is_file()]
    cases = re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text)
    assert not [
        case for file, case in cases if f"def {case}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]


@each_document
def test_commands_of_the_program_exist(path: Path) -> None:
    named = set(re.findall(r"(?:^|`)jaxblt ([a-z]+)\b", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= set(COMMANDS)


def test_every_recipe_and_every_note_is_listed() -> None:
    assert not [name for name in configs.RECIPES if f"`{name}`" not in README]
    notes = ROOT / "docs" / "notes"
    listed = re.findall(r"\]\((\w[\w-]+\.md)\)", (notes / "README.md").read_text(encoding="utf-8"))
    assert {path.name for path in notes.glob("*.md")} == {*listed, "README.md"}
