"""A run that comes with jaxblt, pruned: python -m experiments.benchmark pruning NAME --paths P --out FILE."""

from typing import Annotated, Any

import tyro

from experiments.benchmark.figures.saved import save
from experiments.benchmark.trained_runs.boxed_run import scored_rows


def pruning(
    run: Annotated[str, tyro.conf.Positional],
    paths: tuple[str, ...],
    out: str,
    shares: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    batches: int = 4,
) -> dict[str, Any]:
    """Score a run on the test part of texts with ever more of its weights at 0, those of least magnitude first.

    Nothing is trained after a cut. All shares are scored on the same bytes.

    Args:
      run: its name.
      paths: files or globs, in parts that the run's recipe names.
      out: JSON file to write.
      shares: of the weights of all matrices together.
      batches: the most that are scored, of 8 rows each, spread evenly over the test part.
    """
    import jax

    import jaxblt
    from jaxblt.inference.prune import pruning_curve, weights_of

    loaded = jaxblt.load(run, dtype="float32")
    data = scored_rows(loaded.recipe.data, paths)
    curve = pruning_curve(loaded, shares, split="test", data=data, max_batches=batches)
    kept = ("share", "sparsity", "bits_per_byte", "bytes")
    found = {
        "run": run,
        "parameters": sum(x.size for x in jax.tree.leaves(loaded.params)),
        "weights": sum(x.size for x in weights_of(loaded.params).values()),
        "curve": [{name: row[name] for name in kept} for row in curve],
    }
    save("pruning", out, found)
    return found
