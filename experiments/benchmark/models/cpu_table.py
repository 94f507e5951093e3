"""Step time and memory of the demo recipe on a CPU: python -m experiments.benchmark cpu_table --out FILE.

On a quiet machine: taskset -c 0,1 python -m experiments.benchmark cpu_table --out experiments/results/cpu.json
"""

import json
import os
import subprocess
import sys
from typing import Any


def cpu_table(
    out: str,
    lengths: tuple[int, ...] = (1024, 4096, 16_384),
    batch_bytes: int = 16_384,
    trials: int = 20,
    entropy_run: str = "runs/cpu_table_entropy",
) -> None:
    """Time the demo recipe's train step at several lengths, each in a process of its own.

    Every step reads the same number of bytes: rows grow fewer as they grow longer. The entropy model is trained first,
    on embedded data, unless its folder holds it already.

    Args:
      out: file for the figures as JSON.
      lengths: bytes of a row.
      batch_bytes: bytes of a step; a multiple of every length.
      trials: steps timed at each length, at least 20.
      entropy_run: folder of the entropy model's run.
    """
    odd = [length for length in lengths if length < 1 or batch_bytes % length]
    if odd:
        raise ValueError(f"batch_bytes = {batch_bytes} is no multiple of the lengths {odd}: change either")
    import jax

    from experiments.benchmark.figures.saved import save

    _python("experiments.train", "demo_entropy", "--run-dir", entropy_run)
    rows = []
    for length in lengths:
        options = {"seq_len": length, "batch_size": batch_bytes // length}
        rows.append(row(**options, entropy_run=entropy_run, trials=trials))
        print(json.dumps(rows[-1]), flush=True)
    jax.config.update("jax_platforms", "cpu")  # where the rows were measured, whatever else the machine has
    save("cpu_table", out, {"recipe": "demo", "rows": rows})


def row(**options: Any) -> dict[str, Any]:
    """Return what `cpu_row` measures, in a process of its own: peak memory is then that of one length."""
    said = _python("experiments.benchmark.models.cpu_row", json.dumps(options))
    return json.loads(said.splitlines()[-1])


def _python(module: str, *args: str) -> str:
    """Return what a module prints when it runs on the CPU.

    Raises:
      RuntimeError: it failed; says why.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(args)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
