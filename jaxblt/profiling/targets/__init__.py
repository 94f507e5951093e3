"""GPUs to compile for on a machine that has none: what the compiler must know of each, as text beside this file."""

import importlib.util
from pathlib import Path
from typing import Any

from jax.experimental import topologies

HOST = 8
"""GPUs of a host; more are several hosts of as many."""

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
MISSING = (
    "compiling for a GPU that is not here takes JAX's CUDA plugin: pip install 'jaxblt[cuda13]', or use the "
    "environment of `make plan`"
)


def known_gpus() -> list[str]:
    """Return the names that `devices_of` takes."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.txt"))


def devices_of(gpu: str, count: int) -> list[Any]:
    """Return `count` devices of a named type, to compile for; nothing can run on them.

    Start Python with JAX_PLATFORMS=cpu, or JAX looks for a GPU of its own.

    Raises:
      ValueError: there is no such GPU, or the devices do not fill their hosts.
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    if gpu not in known_gpus():
        raise ValueError(f"no GPU {gpu!r} to compile for, known: {', '.join(known_gpus())}")
    hosts, each = (1, count) if count <= HOST else (count // HOST, HOST)
    if count < 1 or hosts * each != count:
        raise ValueError(f"{count} devices do not fill hosts of {HOST}: use 1 to {HOST}, or a multiple")
    if not any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
        raise RuntimeError(MISSING)
    text = (Path(__file__).parent / f"{gpu}.txt").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x{hosts}x{each}")
    return list(topology.devices)
