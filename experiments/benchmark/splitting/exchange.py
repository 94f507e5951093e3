"""Messages between the GPUs of one host: each device sends to the next one of a ring."""

from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import timed
from jaxblt.profiling import Case, measure


def send_message(mib: float) -> dict[str, Any]:
    """Time one message of `mib` MiB from each device to the next, while as much comes in.

    Raises:
      RuntimeError: a device did not get what the one before it sent.
      ValueError: the message has no room for a number.
    """
    case = prepare(mib)
    taken = timed(measure(case.fn, *case.args, method="calls"))
    return {"mib": mib, "seconds": taken, "gib_per_second": mib / 1024 / taken["median"]}


def prepare(mib: float) -> Case:
    """Return the exchange, compiled; its message has arrived once.

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
        compiled = hop.lower(x).compile()
        if np.asarray(compiled(x)).tobytes() != np.roll(sent, count, 1).tobytes():
            raise RuntimeError(f"{mib} MiB did not arrive as they were sent")
    return Case("message", compiled, (x,))
