"""A run that comes with jaxblt on other texts: python -m experiments.benchmark boxed_run NAME --paths P --out FILE."""

from dataclasses import replace
from typing import Annotated, Any

import tyro

from experiments.benchmark.figures.saved import save


def boxed_run(
    run: Annotated[str, tyro.conf.Positional], paths: tuple[str, ...], out: str, batches: int = 24
) -> dict[str, Any]:
    """Score a run that comes with jaxblt on the test part of texts, on batches spread evenly over it.

    Args:
      run: its name.
      paths: files or globs, in folders train, validation and test.
      out: JSON file to write.
      batches: the most that are scored, of 8 rows each; half of a row is context where documents are cut into windows.
    """
    import jaxblt

    loaded = jaxblt.load(run, dtype="float32")
    data = scored_rows(loaded.recipe.data, paths)
    found = {"run": run, **loaded.evaluate("test", data=data, max_batches=batches)}
    save("boxed_run", out, found)
    return found


def scored_rows(data: Any, paths: tuple[str, ...]) -> Any:
    """Return a run's data over other texts, 8 rows a batch; half of a window is context."""
    if data.packing == "windows":
        data = replace(data, context=data.seq_len // 2, partial="keep")
    return replace(data, paths=paths, batch_size=8)
