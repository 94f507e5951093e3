"""Device time of a traced step by kernel."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.profiling import KernelTotal, OpTotal

LEAST = 0.002
"""Share of a step's device time from which a kernel has a row of its own."""


def told(rows: "list[KernelTotal]", launched: "list[OpTotal]", steps: int) -> dict[str, Any]:
    """Return a step's device seconds in all, by kind, by pass, by instruction, and by the kernels' own names."""
    total = sum(row.seconds for row in rows)

    def shares(of: Callable[["KernelTotal"], str]) -> dict[str, dict[str, float]]:
        sums: dict[str, float] = {}
        for row in rows:
            sums[of(row)] = sums.get(of(row), 0.0) + row.seconds
        longest = sorted(sums.items(), key=lambda item: -item[1])
        return {name: {"seconds": part / steps, "share": part / total} for name, part in longest}

    large = [row for row in rows if row.seconds >= LEAST * total]
    kernels = [
        {
            **asdict(row),
            "count": row.count / steps,
            "seconds": row.seconds / steps,
            "share": row.seconds / total,
        }
        for row in large
    ]
    names = [
        {"name": one.name, "count": one.count / steps, "seconds": one.seconds / steps}
        for one in launched
        if one.seconds >= LEAST * total
    ]
    return {
        "device_seconds": total / steps,
        "kinds": shares(lambda row: row.kind),
        "passes": shares(lambda row: row.during),
        "kernels": kernels,
        "launched": names,
    }
