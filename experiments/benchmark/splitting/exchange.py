"""Settings for exchanges between GPUs of one host: python -m experiments.benchmark exchange --out FILE.

Each setting is a set of options of one compilation, which `XLA_FLAGS` has too (`--xla_gpu_collective_permute_mode=peer`
for COLLECTIVES_PEER_MEMORY). What is decided when the channels between GPUs are made, as their number, holds for a
process: run this once more with such a flag in `XLA_FLAGS`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from jaxblt.profiling import Case, measure_all

Setting = Literal["default", "memcpy", "peer"]
SETTINGS: dict[Setting, dict[str, Any]] = {
    "default": {},
    "memcpy": {"xla_gpu_use_memcpy_local_p2p": True},
    "peer": {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"},
}


def exchange(
    out: str = "runs/benchmark/exchange.json",
    settings: tuple[Setting, ...] = ("default", "memcpy", "peer"),
    mib: tuple[float, ...] = (1, 16, 256),
) -> dict[str, Any]:
    """Measure bytes per second out of each device, as many come in, while all send to the next one of a ring.

    Args:
      out: JSON file to write.
      settings: of the compilation.
      mib: sizes of the messages, MiB a device.

    Raises:
      RuntimeError: a device did not get what the one before it sent.
      ValueError: there is only one device, or no setting or size; or as `send_messages`.
    """
    import jax

    if not settings or not mib:
        raise ValueError(f"give at least one setting and one size, got {settings} and {mib}")
    if (devices := jax.device_count()) < 2:
        raise ValueError(f"an exchange needs at least 2 devices, there is {devices}: use a machine with more")
    found: dict[str, Any] = {"devices_in_ring": devices, "exchanges": []}
    for size in mib:
        found["exchanges"] += send_messages(size, settings)
        save("exchange", out, found)
    return found


def send_messages(mib: float, settings: Sequence[Setting] = ("default",)) -> list[dict[str, Any]]:
    """Time one message of `mib` MiB from each device to the next, by setting.

    Settings take turns.

    Raises:
      RuntimeError: a device did not get what the one before it sent.
      ValueError: the message has no room for a number.
    """
    made = {setting: _attempt(mib, setting) for setting in settings}
    cases = [case for case in made.values() if isinstance(case, Case)]
    taken = {found.name: timed(found) for found in measure_all(cases, method="calls")}
    return [
        {"setting": setting, "mib": mib} | (case if isinstance(case, dict) else _figures(mib, taken[setting]))
        for setting, case in made.items()
    ]


def _figures(mib: float, taken: dict[str, Any]) -> dict[str, Any]:
    return {"seconds": taken, "gib_per_second": mib / 1024 / taken["median"]}


def _attempt(mib: float, setting: Setting) -> Case | dict[str, Any]:
    import jax

    try:
        return prepare(mib, setting)
    except jax.errors.JaxRuntimeError as error:
        return {"failed": str(error).splitlines()[0]}


def prepare(mib: float, setting: Setting) -> Case:
    """Return the exchange, compiled with the setting's options; its message has arrived once.

    Raises:
      RuntimeError: a device did not get what the one before it sent.
      ValueError: the message has no room for a number.
    """
    import jax
    from jax import lax

    from jaxblt.parallel import batch_sharding, make_mesh, over_sequence

    if mib * 2**20 < 4:
        raise ValueError(f"a message has at least {4 / 2**20:.1e} MiB, got {mib}")
    mesh = make_mesh(data=1, seq=-1)
    n, count = mesh.shape["seq"], int(mib * 2**20) // 4
    route = [(i, (i + 1) % n) for i in range(n)]
    sent = np.arange(n * count, dtype=np.int32)[None]
    with jax.set_mesh(mesh):
        x = jax.device_put(sent, batch_sharding(mesh))
        hop = jax.jit(lambda x: over_sequence(lambda x, *_: lax.ppermute(x, "seq", route), x))
        compiled = hop.lower(x).compile(compiler_options=SETTINGS[setting] or None)
        if np.asarray(compiled(x)).tobytes() != np.roll(sent, count, 1).tobytes():
            raise RuntimeError(f"{mib} MiB did not arrive as they were sent, by setting {setting!r}")
    return Case(setting, compiled, (x,))
