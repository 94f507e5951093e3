"""Measurements by name: python -m experiments.benchmark NAME [options]; without a name, a list of them."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from experiments.benchmark.figures.saved import check_commit
from jaxblt.cli.parsing import parse, run
from jaxblt.profiling.provenance import git_commit
from jaxblt.validation import perhaps

ROOMS = {
    "operations": ("kernels", "sparse_attention"),
    "models": ("drafted_bytes", "scaling", "serving", "start_times"),
    "labels": ("zero_shot",),
    "splitting": ("ring", "sequence_parallel", "split_step"),
    "precision": ("fp8_loss", "quantized_decode", "step_kernels"),
    "served": ("batch_sizes", "real_load", "serving_levels"),
    "trained_runs": ("baselines", "context", "record"),
    "history": ("compare", "keep", "trends"),
    "results": ("features_page", "results"),
}
"""Folders, and their commands: each is the function of its name in the module of its name."""

BENCHMARKS = {name: f"experiments.benchmark.{room}.{name}" for room, names in ROOMS.items() for name in names}
"""The module of each command."""

READERS = ("compare", "features_page", "keep", "record", "results", "trends")
"""They measure nothing, and read what was measured."""


def find(name: str) -> Callable[..., Any]:
    """Return the benchmark of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in BENCHMARKS:
        known = ", ".join(sorted(BENCHMARKS))
        raise ValueError(
            f"unknown benchmark {name!r}{perhaps(name, BENCHMARKS)}, choose one of: {known}; "
            "docs/guides/benchmark.md names scripts that are gone, and where their figures are"
        )
    return getattr(import_module(BENCHMARKS[name]), name)


def main(argv: Sequence[str]) -> None:
    """Parse the options of a benchmark and run it, or print what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m experiments.benchmark NAME [options]")
        for room, names in ROOMS.items():
            print(f"\n{room.replace('_', ' ')}")
            for name in names:
                print(f"  {name:22} {(find(name).__doc__ or '').splitlines()[0]}")
        raise SystemExit(0 if argv else 2)
    name, *rest = argv
    function = find(name)
    if name not in READERS and not {"-h", "--help"} & set(rest):
        # Refuse a tree without a commit before an hour of measuring, not after it.
        check_commit(git_commit()["commit"])
    parse(function, rest, prog=f"python -m experiments.benchmark {name}")


if __name__ == "__main__":
    run(main)
