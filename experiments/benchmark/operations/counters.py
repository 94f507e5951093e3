"""The GPU's counts in an op's kernels: python -m experiments.benchmark counters OP:SHAPE:VERSION:PASS --out FILE."""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import tyro

SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis"),
    *("Occupancy", "WarpStateStats", "LaunchStats"),
)
"""The sections of Nsight Compute that together count what `SHARES` and `COUNTS` name."""
SHARES = {
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "tensor_cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Per cent of a unit's peak; of warps, of those that a multiprocessor can hold."""
COUNTS = {
    "bytes_per_second": "dram__bytes.sum.per_second",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "shared_bytes": "launch__shared_mem_per_block",
}
FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
"""The flags of XLA in the programs that are counted."""
NANOSECONDS = "gpu__time_duration.sum"
STALL = "smsp__average_warps_issue_stalled_"
"""Begins the names of what warps wait for, in warps that wait so for each instruction that is issued."""
STALLS = 3
"""The commonest waits that are kept."""
LEAST = 0.01
"""The least share of a program's time: kernels that take less are added up."""


def counters(programs: Annotated[tuple[str, ...], tyro.conf.Positional], out: str) -> dict[str, Any]:
    """Run versions of ops under Nsight Compute and keep what says why a kernel takes its time.

    Counting replays each kernel, with caches cleared before, so that times differ from a benchmark's. Programs run
    without XLA's CUDA graphs and without its autotuning, which would time its candidates under the profiler: products
    that XLA makes beside a kernel may be slower than they are.

    Args:
      programs: "OP:SHAPE:VERSION:PASS", such as "long_conv:hyena_d768_8k:mosaic_gpu_half:forward"; the names are those
        of the op's benchmark, the pass is "forward" or "forward+backward".
      out: file for the figures as JSON, written at the end: this process would take memory of the GPU before.

    Raises:
      ValueError: there is no program, or one is not of that form.
      FileNotFoundError: Nsight Compute is not on this machine.
      RuntimeError: a program failed; the file has those before it, if there are any.
    """
    from experiments.benchmark.figures.saved import save
    from jaxblt.profiling.provenance import provenance

    if not programs:
        raise ValueError('there is nothing to count: name programs, "OP:SHAPE:VERSION:PASS"')
    for program in programs:
        if program.count(":") != 3:
            raise ValueError(f"{program!r} is no program: it takes OP:SHAPE:VERSION:PASS")
    if shutil.which("ncu") is None:
        raise FileNotFoundError("ncu not found: install NVIDIA Nsight Compute, or add it to PATH")
    found: dict[str, Any] = {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    try:
        for program in programs:
            found[program] = read_counts(_counted(program, flags))
    finally:
        if found:
            origin = provenance()
            origin["environment"] = origin["environment"] | {"XLA_FLAGS": flags}
            save("counters", out, {"programs": found}, origin)
    return {"programs": found}


def _counted(program: str, flags: str) -> list[str]:
    """Return lines of Nsight Compute's table of one program."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "counts.csv"
        options = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw")
        options += ("--print-units", "base")
        sections = [part for name in SECTIONS for part in ("--section", name)]
        run = [sys.executable, "-m", "experiments.benchmark.operations.counted_program", program]
        command = ["ncu", *options, *sections, "--log-file", str(table), *run]
        done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=False)
        lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    if done.returncode:
        raise RuntimeError(
            f"{program} ended with {done.returncode} under ncu: see its output above{_said(lines)}"
        )
    return lines


def _said(lines: Iterable[str]) -> str:
    """Return what Nsight Compute complains of."""
    return "".join(f"; {line}" for line in lines if line.startswith(("==ERROR==", "==WARNING==")))


def read_counts(lines: Iterable[str]) -> dict[str, Any]:
    """Return kernels in the order that they ran in, and the seconds of all and of those left out as short.

    Raises:
      ValueError: no kernel was counted.
    """
    lines = list(lines)
    rows = list(csv.DictReader(line for line in lines if not line.startswith("==")))
    if len(rows) < 2:
        raise ValueError(
            f"no kernel was counted: the program ran none where the profiler looked{_said(lines)}"
        )
    # Skip the first row, which has units
    kernels = [_kernel(row) for row in rows[1:]]
    total = sum(kernel["seconds"] for kernel in kernels)
    kept = [kernel for kernel in kernels if kernel["seconds"] >= LEAST * total]
    rest = total - sum(kernel["seconds"] for kernel in kept)
    return {"seconds": total, "seconds_of_short_kernels": rest, "kernels": kept}


def _kernel(row: dict[str, str]) -> dict[str, Any]:
    waits = {
        name.removeprefix(STALL).removesuffix("_per_issue_active.ratio"): _number(value)
        for name, value in row.items()
        if name.startswith(STALL) and name.endswith("_per_issue_active.ratio") and "selected" not in name
    }
    commonest = sorted(waits, key=lambda name: -waits[name])[:STALLS]
    return {
        "name": row["Kernel Name"],
        "seconds": 1e-9 * _number(row[NANOSECONDS]),
        **{name: int(_number(row[metric])) for name, metric in COUNTS.items()},
        "percent": {name: _number(row[metric]) for name, metric in SHARES.items()},
        "waits": {name: waits[name] for name in commonest},
    }


def _number(text: str) -> float:
    return float(text.replace(",", ""))
