"""One of several processes: starts, computes over all, writes and reads checkpoints, agrees to stop."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.parallel import (
    batch_sharding,
    init_distributed,
    local_rows,
    make_global,
    make_mesh,
    process_table,
    replicated,
)
from jaxblt.training.preemption import StopRequest, Vote
from jaxblt.training.state import Frozen, content_hash
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.frozen_store import read_frozen, write_frozen
from tests.parameters import abstract_like

BATCH, LENGTH = 8, 12


def whole_batch() -> np.ndarray:
    return np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)


def sums(mesh: jax.sharding.Mesh) -> dict[str, object]:
    sharding = batch_sharding(mesh)
    start, stop = local_rows(sharding, BATCH)
    x = make_global({"x": whole_batch()[start:stop], "none": None}, sharding, batch_size=BATCH)["x"]
    total = jax.jit(lambda x: jnp.sum(x * x))(x)
    shards = {str(shard.index): np.asarray(shard.data).tolist() for shard in x.addressable_shards}
    return {"rows": [start, stop], "shape": x.shape, "total": int(total), "shards": shards}


def through_mixers(mesh: jax.sharding.Mesh | None) -> dict[str, list[float]]:
    """A weighted sum of outputs and of its gradients, of a ring and of Hyena; over `seq`, which spans the processes."""
    hyena = HyenaConfig(dim=8, filter=ModalFilter(modes=4, max_timescale=64.0))
    configs = {"ring": AttentionConfig(dim=8, num_heads=2, context_parallel="ring"), "hyena": hyena}
    x = np.sin(np.arange(32 * 8, dtype=np.float32)).reshape(1, 32, 8)
    found = {}

    def weigh(y: jax.Array) -> jax.Array:
        """No two places alike."""
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32) ** 2).reshape(y.shape))

    for name, config in configs.items():
        mixer = config.build()
        params = jax.device_get(jax.jit(mixer.init)(jax.random.key(0), x))

        def loss(params: Any, x: jax.Array, mixer: Any = mixer) -> jax.Array:
            return weigh(mixer.apply(params, x)[0] ** 2)

        def run(params: Any, x: jax.Array, loss: Any = loss) -> list[jax.Array]:
            value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
            return [value, optax.tree.norm(gradients[0]), weigh(gradients[1])]

        if mesh is None:
            found[name] = [float(y) for y in jax.jit(run)(params, x)]
            continue
        placed = jax.device_put(params, replicated(mesh)), make_global(x, batch_sharding(mesh), batch_size=1)
        with jax.set_mesh(mesh):
            found[name] = [float(y) for y in jax.jit(run, out_shardings=replicated(mesh))(*placed)]
    return found


def stops(process: int) -> list[int]:
    """The steps at which this process is told to stop, when the last process gets a SIGTERM before step 3."""
    agreed, vote = [], Vote()
    with StopRequest() as stop:
        for step in range(8):
            if step == 3 and process == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if vote(stop.here, step)[0]:
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
    base = Frozen(state, content_hash(state))
    write_frozen(folder, {"base": base})
    back = read_frozen(folder, "base", base.content_hash, abstract_like(state))
    assert back.params["w"].sharding == split
    return {"read": read, "meta": meta, "step": step, "fallen": fallen.step, "hash": base.content_hash}


def main(folder: Path) -> None:
    launch = init_distributed(timeout_s=60)
    assert launch is not None
    table = process_table()
    wide = make_mesh(fsdp=2)
    report = {
        "table": table,
        "by_rows": sums(wide),
        "by_sequence": sums(make_mesh(data=2, seq=-1)),
        "mixers": through_mixers(make_mesh(data=1, seq=-1)),
        "checkpoints": checkpoints(folder, wide),
        "stops": stops(launch.process_id),
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
