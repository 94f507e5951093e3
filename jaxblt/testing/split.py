"""Properties of rows that a mesh splits along the sequence: prompts, and that no device gathers them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.mixers.driver.base import init_state
from jaxblt.mixers.driver.sequence import SHORTEST
from jaxblt.parallel import batch_sharding, make_mesh, replicated
from jaxblt.testing.collectives import collectives
from jaxblt.testing.subject import Subject, expect_close

DEVICES = 2
GATHERED_OVER = 4
LENGTH = 512
LARGEST = 0.5
"""Bytes that all devices may gather or sum, in units of the bytes of the mixer's inputs."""


def check_split_call(subject: Subject) -> None:
    """Check that a prompt split along the sequence leaves one device's outputs and state.

    Before it come a few tokens of the same document, behind it a few of what it ended in: the calls of a
    conversation. A row changes its document amid the prompt, and one has nothing but 0s at its end.
    """
    ends = 7  # a call of as many is compiled already, unless the state grows with its capacity
    sizes = (ends, SHORTEST * DEVICES, ends)
    total = sum(sizes)
    x = subject.noise(10, (subject.rows, total, subject.config.dim))
    ids = np.ones((subject.rows, total), np.int32)
    if subject.packed:
        ids[1, ends + SHORTEST // 2 :] = 2
    ids[2, ends + SHORTEST + 7 : -ends] = 0

    def played() -> np.ndarray:
        state, outputs, at = init_state(subject.config, subject.rows, capacity=total), [], 0
        for size in sizes:
            part = slice(at, at + size)
            y, state = subject.step(params, x[:, part], ids[:, part], state)
            outputs.append(np.asarray(y))
            at += size
        return np.concatenate(outputs, 1)

    params = subject.params
    expected = played()
    mesh = make_mesh(data=1, seq=DEVICES, devices=jax.devices()[:DEVICES])
    with jax.set_mesh(mesh):
        params = jax.device_put(subject.params, replicated(mesh))
        found = played()
    live = ids > 0
    expect_close("a prompt split along the sequence differs", found[live], expected[live], subject.limit)


def check_gathers(subject: Subject) -> None:
    """Check that devices exchange carries, not rows: less than half of the inputs' bytes.

    Reads the compiled training pass of rows of 512 tokens over four devices. Exchanges that leave a device its share
    (all-to-all, ring passes) are not counted.
    """
    mesh = make_mesh(data=1, seq=GATHERED_OVER, devices=jax.devices()[:GATHERED_OVER])
    shape = (subject.rows, LENGTH, subject.config.dim)
    with jax.set_mesh(mesh):
        along = batch_sharding(mesh)
        x, ids = (
            jax.ShapeDtypeStruct(s, d, sharding=along)
            for s, d in ((shape, jnp.float32), (shape[:2], jnp.int32))
        )
        params = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=replicated(mesh)), subject.params
        )
        forward: Any = subject.parallel
        compiled = forward.lower(params, x, ids).compile()
    gathered = [c for c in collectives(compiled) if c.kind in ("all-gather", "all-reduce")]
    count, limit = sum(c.bytes for c in gathered), int(LARGEST * np.prod(shape) * 4)
    if count > limit:
        worst = max(gathered, key=lambda c: c.bytes)
        raise AssertionError(
            f"devices of the sequence gather {count} bytes for inputs of {2 * limit}, the most by {worst.kind} to "
            f"{worst.dtype}{list(worst.shape)}: exchange a carry of constant size (see jaxblt.mixers.driver.sequence)"
        )
