"""The origin of a result: versions, commit, command line and hardware, as JSON."""

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = (
    "jaxblt",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "jax-triton",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tensorboard",
)
ORIGIN = (
    *("time", "python", "system", "cpu", "cpus", "cpus_usable"),
    *("versions", "git", "argv", "environment", "devices"),
)
"""The entries of `provenance`."""

# Record these: they change what XLA compiles or how devices talk, and so results and speed.
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NCCL_NVLS_ENABLE")


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return versions of installed packages, without importing any; others are left out."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_commit() -> dict[str, Any]:
    """Return `commit`, and whether the checkout has changes beyond it (`dirty`).

    The variable JAXBLT_COMMIT comes first, for code that was copied to a machine whose checkout, if any, is another;
    `dirty` is None then. Without it and without a checkout both are None.
    """
    if named := os.environ.get("JAXBLT_COMMIT"):
        return {"commit": named, "dirty": None}
    commit, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    if commit is None:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def cpu_model() -> str:
    """Return the CPU's name as the system tells it; JAX calls all of them "cpu"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def device_summary() -> dict[str, Any]:
    """Return platform, kind, CUDA capability and counts of the devices that JAX uses."""
    first = jax.local_devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "capability": getattr(first, "compute_capability", None),
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def provenance() -> dict[str, Any]:
    """Return all of it: written beside every checkpoint and every measured number."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": package_versions(),
        "git": git_commit(),
        "argv": [Path(word).name if Path(word).is_absolute() else word for word in sys.argv],
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "devices": device_summary(),
    }
