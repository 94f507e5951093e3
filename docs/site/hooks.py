"""What MkDocs does not do itself: pages made of code, of notebooks and of files outside docs/, and their links."""

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

import commands
import notebooks
import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages whose text lies beside docs/, and their places on the site."""
NOTEBOOKS = ROOT / "experiments" / "notebooks"
ASSETS = ROOT / "docs" / "site" / "assets"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?(https?:[^"'\s>]+)|<link[^>]*rel=["']?(?:stylesheet|preconnect|preload)["']?[^>]*href=["']?(https?:[^"'\s>]+)"""
)


def on_config(config: Any) -> Any:
    """Put a folder's pages where the navigation names the folder, and link the repository that the package names."""
    config.nav = _listed(config.nav)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    config.repo_name = project["name"]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, the site's own scripts and styles, and the pictures that pages show from outside docs/."""
    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for folder, paths in (
        ("pictures", (ROOT / "experiments" / "results").glob("*.png")),
        ("assets", ASSETS.iterdir()),
    ):
        for path in sorted(paths):
            files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to where their targets lie on the site; keep a target that has no page as text."""
    outside = {place: name for name, place in OUTSIDE.items()}
    place = page.file.src_uri
    origin = outside.get(place, f"docs/{place}")
    return LINK.sub(lambda link: _led(link, origin, place), markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that loads anything from another server."""
    found = [address for pair in LOADED.findall(output) for address in pair if address]
    if found:
        raise PluginError(f"{page.file.src_uri} loads {found[0]}: keep the site's files on the site")
    return output


def generated() -> dict[str, str | bytes]:
    """Return the text of the generated pages, and pictures that they show, by place."""
    texts: dict[str, str | bytes] = {
        place: (ROOT / name).read_text(encoding="utf-8") for name, place in OUTSIDE.items()
    }
    for path in _notebooks():
        texts[f"notebooks/{path.stem}.md"], pictures = notebooks.as_page(path)
        texts |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
    return {**texts, "command-line.md": commands.page(), **reference.pages()}


def _notebooks() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def _listed(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_listed(entry) for entry in nav]
    if isinstance(nav, dict):
        return {title: _listed(entry) for title, entry in nav.items()}
    return _pages_in(nav) if nav.endswith("/") else nav


def _pages_in(folder: str) -> list[str]:
    if folder == "notebooks/":
        return [f"{folder}{path.stem}.md" for path in _notebooks()]
    if folder == "reference/":
        return list(reference.pages())
    names = sorted(path.name for path in (DOCS / folder).glob("*.md"))
    return [f"{folder}{name}" for name in sorted(names, key=lambda name: name != "README.md")]


def _led(link: re.Match[str], origin: str, place: str) -> str:
    picture, text, target, anchor = link.groups(default="")
    if "://" in target:
        return link.group()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    if path.startswith("experiments/notebooks/"):
        found = f"notebooks/{Path(path).stem}.md"
    elif picture and path.startswith("experiments/results/"):
        found = f"pictures/{Path(path).name}"
    elif (ROOT / path).is_dir() and path.startswith("docs/"):
        found = f"{path.removeprefix('docs/')}/README.md"
    elif path.startswith("docs/"):
        found = path.removeprefix("docs/")
    elif path in OUTSIDE:
        found = OUTSIDE[path]
    else:
        return text
    return f"{picture}[{text}]({posixpath.relpath(found, posixpath.dirname(place) or '.')}{anchor})"
