"""Executes notebooks and writes their outputs into them: python -m experiments.notebooks.execute [NAME ...].

Needs the extra `dev`. Progress bars and times of execution are left out: a notebook changes only with its results.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxblt.cli.parsing import run

HERE = Path(__file__).parent
TIMEOUT_S = 1800
TIMES = re.compile(r"^first step after .*\n", re.MULTILINE)
"""The line of a run's log that is of the machine alone."""


def execute(path: Path) -> Any:
    """The notebook with fresh outputs, run by a kernel of its own in the notebook's folder.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell fails.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3", resources=resources).execute()
    notebook.metadata.pop("language_info", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = TIMES.sub("", output.text)
    return notebook


def main(argv: Sequence[str]) -> None:
    """Executes the named notebooks, all by default, and writes them back.

    Raises:
      FileNotFoundError: there is no notebook of that name.
    """
    import nbformat

    paths = [HERE / f"{name}.ipynb" for name in argv] or sorted(HERE.glob("*.ipynb"))
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no notebook {path.stem!r}, there are: {_names()}")
        nbformat.write(execute(path), path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


def _names() -> str:
    return ", ".join(sorted(path.stem for path in HERE.glob("*.ipynb")))


if __name__ == "__main__":
    run(main)
