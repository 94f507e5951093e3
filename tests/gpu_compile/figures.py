"""Registers and spills as ptxas reports them, and what is worse than accepted."""

import re
from collections.abc import Collection

REPORT = re.compile(
    r"Compiling entry function '(?P<kernel>\w+?)(?P<mosaic>_mosaic_gpu_kernel)?' for '(?P<target>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)

Figures = dict[str, dict[str, int]]
"""Of each kernel: registers per thread, and bytes spilled (stored and loaded) per thread."""


def read_report(text: str, target: str, triton: Collection[str] = ()) -> Figures:
    """Figures of every Mosaic kernel that ptxas reports on, and of those named in `triton`.

    Raises:
      ValueError: it compiled one for another target.
    """
    figures: Figures = {}
    for found in REPORT.finditer(text):
        if not found["mosaic"] and found["kernel"] not in triton:
            continue  # one of XLA's own
        if found["target"] != target:
            raise ValueError(f"{found['kernel']} was compiled for {found['target']}, not for {target}")
        spilled = int(found["stores"]) + int(found["loads"])
        figures[found["kernel"]] = {"registers": int(found["registers"]), "spilled": spilled}
    return figures


def complaints(figures: dict[str, Figures], accepted: dict[str, Figures]) -> list[str]:
    """What spills more than accepted, what is not known there, and what is known and gone."""
    now = {(program, kernel): f for program, kernels in figures.items() for kernel, f in kernels.items()}
    then = {(program, kernel): f for program, kernels in accepted.items() for kernel, f in kernels.items()}
    found = []
    for program, kernel in sorted(now.keys() ^ then.keys()):
        which = "not accepted yet" if (program, kernel) in now else "accepted, but was not compiled"
        found.append(f"{program}: {kernel} is {which}: look at it, then run with --accept and commit")
    for program, kernel in sorted(now.keys() & then.keys()):
        spilled, before = now[program, kernel]["spilled"], then[program, kernel]["spilled"]
        if spilled > before:
            found.append(f"{program}: {kernel} spills {spilled} bytes a thread, accepted are {before}")
    return found
