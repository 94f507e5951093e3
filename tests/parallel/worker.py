"""One of several processes: starts, computes over all, writes and reads checkpoints, agrees to stop."""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.parallel import (
    batch_sharding,
    init_distributed,
    local_rows,
    make_global,
    make_mesh,
    process_table,
)
from jaxblt.training.checkpoint import Checkpointer, abstract_like
from jaxblt.training.preemption import StopRequest

BATCH, LENGTH = 8, 6


def whole_batch() -> np.ndarray:
    return np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)


def sums(mesh: jax.sharding.Mesh) -> dict[str, object]:
    sharding = batch_sharding(mesh)
    start, stop = local_rows(sharding, BATCH)
    x = make_global({"x": whole_batch()[start:stop], "none": None}, sharding, batch_size=BATCH)["x"]
    total = jax.jit(lambda x: jnp.sum(x * x))(x)
    shards = {str(shard.index): np.asarray(shard.data).tolist() for shard in x.addressable_shards}
    return {"rows": [start, stop], "shape": x.shape, "total": int(total), "shards": shards}


def stops(process: int) -> list[int]:
    """The steps at which this process is told to stop, when the last process gets a SIGTERM before step 3."""
    agreed = []
    with StopRequest(every=2) as stop:
        for step in range(8):
            if step == 3 and process == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed(step):
                agreed.append(step)
    return agreed


def checkpoints(folder: Path, mesh: jax.sharding.Mesh) -> dict[str, object]:
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    template = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=split)}
    with Checkpointer(folder / "from_one") as one:
        state, meta, step = one.restore(template)
    read = float(jax.jit(lambda w: jnp.sum(w * jnp.arange(64, dtype=jnp.float32).reshape(16, 4)))(state["w"]))
    with Checkpointer(folder / "from_many") as many:
        assert many.latest_step() is None
        many.save(7, state, {"by": jax.process_count()})
        many.save(8, {"w": state["w"] + 1.0})
        many.wait()
        if jax.process_index() == 0:
            (folder / "from_many" / "8" / "state" / "manifest.ocdbt").unlink()
        fallen = many.restore(abstract_like(state))
    return {"read": read, "meta": meta, "step": step, "fallen": fallen.step}


def main(folder: Path) -> None:
    launch = init_distributed(timeout_s=60)
    assert launch is not None
    table = process_table()
    wide = make_mesh(fsdp=2)
    report = {
        "table": table,
        "by_rows": sums(wide),
        "by_sequence": sums(make_mesh(data=1, fsdp=4, seq=-1))
        if jax.device_count() > 4
        else sums(make_mesh(data=2, seq=2)),
        "checkpoints": checkpoints(folder, wide),
        "stops": stops(launch.process_id),
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
