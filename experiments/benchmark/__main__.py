"""Measurements by name: python -m experiments.benchmark NAME [options]; without a name, a list of them."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from experiments.benchmark._schema import check_commit
from jaxblt.cli.parsing import parse, run
from jaxblt.profiling.provenance import git_commit

BENCHMARKS = {
    "adapter_speed": "adapter_speed",
    "attention_parts": "benchmark",
    "babilong": "babilong",
    "baselines": "baselines",
    "context": "context",
    "counters": "counters",
    "cpu_table": "cpu_table",
    "draw": "draw",
    "entropy": "entropy",
    "exchange": "benchmark",
    "families": "families",
    "fla_slots": "benchmark",
    "flex_attention": "benchmark",
    "gap_recall": "gap_recall",
    "generation": "benchmark",
    "hyena_layer": "hyena_layer",
    "index_search": "index_search",
    "kernels": "kernels",
    "length_generalisation": "length_generalisation",
    "memory_books": "memory_books",
    "memory_context": "memory_context",
    "packed_ring": "benchmark",
    "patching_share": "patching_share",
    "promoters": "promoters",
    "recall": "recall",
    "record": "record",
    "results": "results",
    "ring": "benchmark",
    "routed_lora": "routed_lora",
    "scaling": "scaling",
    "sequence_parallel": "sequence_parallel",
    "sequence_plan": "plan",
    "split_step": "split_step",
    "stack": "stack",
    "streamed_filter": "benchmark",
    "tasks": "tasks",
    "titan_speed": "titan_speed",
    "titans_pytorch": "benchmark",
    "torch_fft_conv": "benchmark",
    "torch_lora": "benchmark",
}
"""The function of each, in the module of its name."""

READERS = ("draw", "record", "results")
"""They measure nothing, and read what was measured."""


def find(name: str) -> Callable[..., Any]:
    """The benchmark of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}, choose one of: {', '.join(BENCHMARKS)}")
    return getattr(import_module(f"experiments.benchmark.{name}"), BENCHMARKS[name])


def main(argv: Sequence[str]) -> None:
    """Parses and measures."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m experiments.benchmark NAME [options]\n")
        for name in BENCHMARKS:
            print(f"{name:18} {(find(name).__doc__ or '').splitlines()[0]}")
        raise SystemExit(0 if argv else 2)
    name, *rest = argv
    function = find(name)
    if name not in READERS and not {"-h", "--help"} & set(rest):
        check_commit(git_commit()["commit"])  # now, and not after an hour of measuring
    parse(function, rest, prog=f"python -m experiments.benchmark {name}")


if __name__ == "__main__":
    run(main)
