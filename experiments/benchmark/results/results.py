"""The two pages of results and README's table, written from the JSON files of the record."""

from pathlib import Path

from experiments.benchmark.results.files import Folder, flags, origins, read_folder
from experiments.benchmark.results.table import figures, markdown, render

RECORD, README = "experiments/results", "README.md"
PAGE, DETAILS = "docs/results.md", "docs/results-details.md"
BEGIN, END = "<!-- Written by `python -m experiments.benchmark results`. -->", "<!-- results end -->"
HERE = Path(__file__).parent


def results(root: str = ".") -> None:
    """Write both pages of results and README's table from experiments/results.

    Args:
      root: of the repository.

    Raises:
      FileNotFoundError: the folder has no record.
      ValueError: a file does not say on what it was measured, or README has no place for the table.
    """
    base = Path(root)
    folder = read_folder(base / RECORD)
    written = {
        base / PAGE: page(folder),
        base / DETAILS: details(folder),
        base / README: with_table((base / README).read_text("utf-8"), folder),
    }
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path)


def page(folder: Folder) -> str:
    """Return the first page: one table a subject."""
    return render((HERE / "page.md").read_text("utf-8"), folder)


def details(folder: Folder) -> str:
    """Return the second page: every other table, and where each file was measured."""
    return f"{render((HERE / 'details.md').read_text('utf-8'), folder)}\n{files(folder)}\n"


def files(folder: Folder) -> str:
    """Return where the figures of all files were measured, those of one origin in a row."""
    measured: dict[tuple[str, ...], list[str]] = {}
    for name, found in folder.items():
        for origin in origins(found):
            measured.setdefault((*origin, flags(found)), []).append(f"`{name}`")
    rows = [
        (", ".join(names), *origin, f"`{given}`" if given else "")
        for (*origin, given), names in measured.items()
    ]
    return markdown(("files", "device", "jax", "commit", "`XLA_FLAGS`"), rows)


def with_table(readme: str, folder: Folder) -> str:
    """Return README with its table as the record has it.

    Raises:
      ValueError: the marks around the table are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"README.md has no {BEGIN!r} with {END!r} behind it: put both where the table belongs"
        )
    return (
        f"{before}{BEGIN}\n{figures((HERE / 'readme.md').read_text('utf-8'), folder).strip()}\n{END}{after}"
    )
