"""The site's settings name files of its own, so that it opens from a folder without a network."""

import re
from pathlib import Path

SITE = Path(__file__).parents[2] / "docs" / "site"
SETTINGS = (SITE / "mkdocs.yml").read_text(encoding="utf-8")


def test_scripts_and_styles_lie_beside_the_settings():
    named = re.findall(r"\bassets/[\w.-]+", SETTINGS)
    assert {Path(name).name for name in named} == {path.name for path in (SITE / "assets").iterdir()}
    assert "  - offline\n" in SETTINGS
    assert "://" not in SETTINGS


def test_every_page_of_the_docs_is_in_the_navigation():
    pages = {path.relative_to(SITE.parent).as_posix() for path in SITE.parent.rglob("*.md")}
    named = set(re.findall(r"^ +- [^:\n]+: (\S+)$", SETTINGS.partition("nav:")[2], re.MULTILINE))
    folders = {"guides/", "notes/"} & set(re.findall(r"(\S+/)$", SETTINGS, re.MULTILINE))
    assert not [page for page in pages - named if f"{page.partition('/')[0]}/" not in folders]
