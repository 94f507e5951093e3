"""Packs a run as one that comes with jaxblt: `python -m experiments.box RUN_DIR NAME --out FOLDER`.

FOLDER/NAME.zip holds weights in bfloat16 and names the data that the recipe NAME reads, whatever the run read. Its
SHA-256, which `boxed.json` is to say, is printed.
"""

import hashlib
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro

import jaxblt
from jaxblt import boxed, recipes
from jaxblt.interchange.runs import alone, write_run_folder
from jaxblt.outputs import whole_file

DAY = (2026, 1, 1, 0, 0, 0)
"""The date of all entries, so that the archive says nothing of when it was made."""


def box(
    run_dir: Annotated[str, tyro.conf.Positional],
    name: Annotated[str, tyro.conf.Positional],
    /,
    out: Path = boxed.HERE,
) -> str:
    """Write a run's newest checkpoint as an archive for the box, and return its SHA-256.

    Args:
      run_dir: folder of the run.
      name: of the recipe that trained it, and of the run in the box.
      out: folder to write NAME.zip into; it must not be there.
    """
    archive = out / f"{name}.zip"
    if archive.exists():
        raise FileExistsError(f"{archive} is there: remove it, or choose another folder by --out")
    run = jaxblt.load(run_dir)
    recipe = replace(alone(run.recipe), name=name, data=recipes.get(name).data)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), run.params)
    with tempfile.TemporaryDirectory() as folder:
        write_run_folder(Path(folder, name), recipe, params, dict(run.frozen), step=run.step)
        with whole_file(archive) as partial:
            write_archive(Path(folder, name), partial)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def write_archive(folder: Path, archive: Path) -> None:
    """Write a folder's files as a zip archive, by name."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(str(file.relative_to(folder)), DAY)
            written.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    print(tyro.cli(box))
