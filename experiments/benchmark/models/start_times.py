"""Seconds from a fresh process to a recipe's first step: python -m experiments.benchmark start_times --out FILE."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.benchmark.figures.saved import save
from jaxblt.validation import whole

LINE = re.compile(r"first step after ([\d.]+) s: (.*)")
BOOK = (
    *("--data.sample", "book", "--data.paths", "--data.split", "position"),
    *("--data.validation-names", "--data.test-names"),
)
"""Options that put the embedded book in place of a recipe's files."""


def start_times(
    out: str, recipes: tuple[str, ...] = ("books",), repeats: int = 3, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Start recipes in processes of their own, with empty caches and again with what the first one left there.

    Seconds count from the start of the process, the imports too, until the result of the first step is there. The
    parts are those that `fit` tells. Data are the embedded book. A recipe that reads entropies takes them from a run
    of its entropy recipe of one step. Each repeat begins with caches of its own: of compiled programs, calibrations and
    what CUDA keeps. Python's bytecode is there in both, as where packages are installed by pip, though the machine may
    switch it off: a start that does not count writes it.

    Args:
      out: JSON file to write, anew after each start.
      recipes: their names.
      repeats: of both starts.
      options: of `jaxblt train`, besides.

    Raises:
      RuntimeError: a run ended before its first step.
    """
    from jaxblt import recipes as known

    whole("--repeats", repeats, least=1)
    figures: dict[str, Any] = {"options": list(options), "recipes": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in recipes:
            more = list(options)
            if known.get(name).entropy_run is not None:
                more += ["--entropy-run", _entropy_run(name, Path(folder))]
            started(name, Path(folder) / f"{name}_first", Path(folder) / "uncounted", more)
            found: dict[str, list[Any]] = {"cold": [], "warm": []}
            for repeat in range(repeats):
                cache = Path(folder) / f"{name}_{repeat}"
                for kind in found:
                    found[kind].append(started(name, Path(f"{cache}_{kind}"), cache, more))
                    figures["recipes"][name] = {of: summed(starts) for of, starts in found.items() if starts}
                    save("start_times", out, figures)
    return figures


def _entropy_run(name: str, folder: Path) -> str:
    """Train the entropy model of a recipe for one step, and return its run."""
    run = folder / f"{name}_entropy"
    steps = ("steps", "log-every", "eval-every", "checkpoint-every")
    once = [word for step in steps for word in (f"--train.{step}", "1")]
    command = [
        *_command(f"{name}_entropy", run, folder / "cache_of_entropy"),
        "--train.eval-batches",
        "1",
        *once,
    ]
    if status := subprocess.run(command, env=_environment(folder / "cache_of_entropy")).returncode:
        raise RuntimeError(f"{name}_entropy ended with status {status}; its log is above")
    return str(run)


def _environment(cache: Path) -> dict[str, str]:
    """Return variables of a start; caches beside each other share Python's bytecode."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "CUDA_CACHE_PATH": str(cache / "cuda"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "PYTHONPYCACHEPREFIX": str(cache.parent / "bytecode"),
    }


def _command(name: str, run: Path, cache: Path) -> list[str]:
    compiled = ["--train.compilation-cache", str(cache / "compiled")]
    return [sys.executable, "-m", "jaxblt", "train", name, "--run-dir", str(run), *BOOK, *compiled]


def started(name: str, run: Path, cache: Path, options: Sequence[str]) -> dict[str, Any]:
    """Start a run and end it after its first step; return its seconds, those before `fit`, and its parts."""
    began, said = time.perf_counter(), list[str]()
    with subprocess.Popen(
        [*_command(name, run, cache), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(cache),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if match := LINE.search(line):
                seconds = time.perf_counter() - began
                process.kill()
                return {"seconds": seconds, "before_fit": seconds - float(match[1]), **_parts(match[2])}
    raise RuntimeError(f"{name} ended before its first step:\n{''.join(said[-20:])}")


def _parts(told: str) -> dict[str, Any]:
    """Return the parts of "data 1.2, tracing 3.0"."""
    pairs = [part.rsplit(" ", 1) for part in told.strip().split(", ")]
    return {"parts": {name: float(seconds) for name, seconds in pairs}}


def summed(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of several starts, with their range and the median of each part."""
    seconds = [start["seconds"] for start in starts]
    names = starts[0]["parts"]
    return {
        "seconds": {
            "median": median(seconds),
            "low": min(seconds),
            "high": max(seconds),
            "trials": len(seconds),
        },
        "before_fit": median(start["before_fit"] for start in starts),
        "parts": {name: median(start["parts"][name] for start in starts) for name in names},
    }
