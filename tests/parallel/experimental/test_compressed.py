"""Gradients in 8 bits: nothing is lost, means approach the exact ones, and messages are a byte a number."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from jaxblt.parallel import make_mesh
from jaxblt.parallel.experimental import Mean, compressed_mean, zero_error
from jaxblt.parallel.experimental.compressed import BLOCK
from jaxblt.testing.collectives import collectives
from tests.tolerances import assert_close

DEVICES, STEPS = 4, 32
SHAPES = {"b": (DEVICES, 7), "w": (DEVICES, 40, 50)}


def test_errors_are_kept_and_messages_are_bytes() -> None:
    draw = np.random.default_rng(0)
    given = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    mesh = make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES])

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def run(given: Any, error: Any) -> Any:
        found = compressed_mean(jax.tree.map(lambda x: x[0], given), error[0], axis="data")
        return jax.tree.map(lambda x: x[None], found)

    error = np.tile(zero_error({name: x[0] for name, x in given.items()}, DEVICES), (DEVICES, 1))
    compiled = run.lower(given, jnp.asarray(error)).compile()
    sent = collectives(compiled)
    assert {c.bits for c in sent} == {8, 32}
    # A scale of 4 bytes goes with each block.
    assert sum(c.bytes for c in sent if c.bits == 8) * 4 == sum(c.bytes for c in sent if c.bits == 32) * BLOCK

    of_all = np.stack([ravel_pytree({name: x[i] for name, x in given.items()})[0] for i in range(DEVICES)])
    exact, total, off = of_all.mean(0), 0, []
    for _ in range(STEPS):
        found: Mean = jax.device_get(compiled(given, error))
        means = np.concatenate([found.gradients[name].reshape(DEVICES, -1) for name in SHAPES], 1)
        np.testing.assert_array_equal(means, means[:1].repeat(DEVICES, 0))
        padded = np.pad(means[0], (0, error.shape[1] - exact.size))
        lost = (found.error - error).sum(0)
        assert_close(
            jnp.asarray((DEVICES * padded + lost)[: exact.size]),
            jnp.asarray(of_all.sum(0)),
            n=DEVICES * BLOCK,
        )
        error, total = found.error, total + means[0]
        off.append(np.abs(total / (len(off) + 1) - exact).max())
    # Two roundings, each off by half a scale: a 254th of the largest number of a block.
    assert 0 < off[0] <= 2 * np.abs(of_all).max() / 254
    assert off[-1] <= 2 * off[0] / STEPS * 2
