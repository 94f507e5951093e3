"""Measured memory of train steps by context on a CPU: python -m experiments.benchmark measured_memory --out FILE.

The compiler's plan is what it lays out beyond a step's arguments. What is measured is by how much the process grows
from before a step's call to its peak, as the kernel counts resident bytes (Linux): the most of three steps.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from experiments.benchmark.memory.memory_context import Name, check_lengths

RETURNED = 65_536
"""Bytes from which the allocator gives freed memory back at once; else it keeps up to 32 MB, which steps then reuse."""


def measured_memory(
    out: str,
    models: tuple[Name, ...] = ("attention", "mag", "window", "slots"),
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    dim: int = 128,
    num_layers: int = 1,
    window: int = 64,
    chunk_size: int = 64,
) -> dict[str, Any]:
    """Run a train step of each model at each length, and set its measured memory beside the compiler's plan.

    A step is AdamW's, in fp32, of one row, with full remat. Exponents are of what each step in length adds, planned and
    measured. What a model saves is 1 less its measured bytes over attention's at the longest row.

    Args:
      out: JSON file, written anew after each model.
      models: as for `memory_context`; attention is among them.
      lengths: bytes of a row, each the same multiple of the one before.
      dim: width; heads have 64.
      num_layers: blocks.
      window: steps that attention sees.
      chunk_size: bytes from update to update of a neural memory.

    Raises:
      ValueError: lengths do not rise as said, or attention is not among the models.
      RuntimeError: the process of a model failed; says why.
    """
    import jax

    from experiments.benchmark.figures.saved import save

    check_lengths(models, lengths, lengths)
    jax.config.update("jax_platforms", "cpu")  # where steps run, whatever else the machine has
    shape = {"dim": dim, "num_layers": num_layers, "window": window, "chunk_size": chunk_size}
    found: dict[str, Any] = {}
    for name in models:
        found[name] = summary(measured_steps(name=name, lengths=lengths, shape=shape))
        save("measured_memory", out, {**shape, "rows": 1, "dtype": "float32", "models": found} | saved(found))
    return found


def measured_steps(**options: Any) -> list[dict[str, Any]]:
    """Return what `measured_steps` finds of one model, in a process of its own.

    Raises:
      RuntimeError: it failed; says why.
    """
    done = subprocess.run(
        [sys.executable, "-m", "experiments.benchmark.memory.measured_steps", json.dumps(options)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": str(RETURNED)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"steps of {options['name']} failed: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps with measured bytes over planned ones, and exponents of what each step in length adds."""
    from experiments.benchmark.figures.exponents import exponent

    lengths = [step["tokens"] for step in steps]
    added = {kind: [b[kind] - a[kind] for a, b in pairwise(steps)] for kind in ("planned", "measured")}
    return {
        "steps": [{**step, "measured_over_planned": step["measured"] / step["planned"]} for step in steps],
        "exponent_of_added": {
            kind: exponent(lengths[:-1], values, first=lengths[0]) if min(values) > 0 else None
            for kind, values in added.items()
        },
    }


def saved(found: dict[str, Any]) -> dict[str, Any]:
    """Return the share of attention's measured bytes that each other model saves at the longest row."""
    if "attention" not in found:
        return {}
    last = {name: one["steps"][-1]["measured"] for name, one in found.items()}
    return {
        "saved": {name: 1 - size / last["attention"] for name, size in last.items() if name != "attention"}
    }
