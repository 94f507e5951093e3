"""The form of results: figures as JSON with the device, versions and commit that they are of."""

import json
import math
import re
from pathlib import Path
from typing import Any

from jaxblt.profiling import Measurement
from jaxblt.profiling.provenance import provenance

SCHEMA = 2
"""Files without a number are older: they have what `experiments.benchmark results` reads from them."""

RECORD = Path(__file__).resolve().parents[2] / "results"
"""The folder of what is published."""

ON_CPU = ("baselines", "promoter_baselines", "scaling_on_cpu", "tasks")
"""Benchmarks whose figures are of no GPU: counts, answers that are right, or times of a CPU."""

_COMMIT = re.compile("[0-9a-f]{7,40}")


def timed(found: Measurement) -> dict[str, Any]:
    """Return median seconds with their 95 % interval, and the span with gaps between kernels, if there is one."""
    taken = {name: getattr(found.summary, name) for name in ("median", "low", "high", "trials")}
    return taken | {"method": found.method} | ({} if found.span is None else {"span": found.span})


def save(benchmark: str, out: str, figures: dict[str, Any], origin: dict[str, Any] | None = None) -> None:
    """Write the figures to `out` with where they come from, and print the figures.

    Args:
      benchmark: its name.
      out: JSON file.
      figures: what was found; no name of theirs may be one of `origin`.
      origin: as `provenance` gives it; that of this process if None.

    Raises:
      ValueError: see `check_origin`; or a figure has a name that says where figures come from.
    """
    origin = {"schema": SCHEMA, "benchmark": benchmark} | (provenance() if origin is None else origin)
    check_origin(benchmark, origin, published=Path(out).resolve().is_relative_to(RECORD))
    if taken := sorted(figures.keys() & origin.keys()):
        raise ValueError(f"figures named {taken} would be lost: {sorted(origin)} say where they come from")
    figures = finite(figures)
    file = Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")  # a call that is cut off leaves the old file
    partial.write_text(json.dumps({**figures, **origin}, indent=2) + "\n", encoding="utf-8")
    partial.replace(file)
    print(json.dumps(figures, indent=2))


def finite(value: Any) -> Any:
    """Return the figures with None for each number that is not finite, which JSON cannot write."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_commit(commit: str | None) -> None:
    """Refuse what is no commit's hash.

    Raises:
      ValueError: says what to set where the code is no git checkout.
    """
    if not _COMMIT.fullmatch(commit or ""):
        raise ValueError(
            f"a result names the commit that it measured, got {commit}: where the code is no git checkout, set "
            "JAXBLT_COMMIT to what `git rev-parse HEAD` says where it is one"
        )


def check_origin(benchmark: str, origin: dict[str, Any], *, published: bool) -> None:
    """Refuse an origin from which nobody could measure again.

    Raises:
      ValueError: no commit, no versions or no device; or what is published of a GPU was measured without one.
    """
    versions, devices = origin["versions"], origin["devices"]
    check_commit(origin["git"]["commit"])
    if missing := [name for name in ("jax", "jaxlib") if not versions.get(name)]:
        raise ValueError(f"a result names versions, and {missing} are not among {versions}")
    if not devices.get("kind") or not origin.get("cpu"):
        raise ValueError(f"a result names its devices, got {devices} and CPU {origin.get('cpu')!r}")
    if published and devices["platform"] != "gpu" and benchmark not in ON_CPU:
        raise ValueError(
            f"{benchmark} is published from a GPU, this is {devices['platform']}: write elsewhere than {RECORD.name}/"
        )
