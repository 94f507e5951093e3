"""Slots that a chunk writes to, gathered: the values of dense slots, in fewer operations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers.driver.marks import mark
from jaxblt.mixers.slots.chosen_slots import write_chosen
from jaxblt.mixers.slots.state_slots import Slots, SlotStreams, largest, routed, write_and_read
from tests.tolerances import assert_close

ROWS, LENGTH, HEADS, WIDTH, SLOTS, ROUTES, CHUNK = 2, 23, 2, 4, 40, 2, 4
IDS = np.array([[1] * 6 + [2] * 3 + [-2] * 2 + [3] * 9 + [0] * 3, [0] * 8 + [1] * 5 + [-1] * 2 + [1] * 8])


def streams_of(rows: int, length: int, width: int, slots: int, routes: int) -> SlotStreams:
    """Normal queries, keys and values, and gates of the likeliest routes."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal((rows, length, HEADS, *shape)), jnp.float32)  # noqa: E731
    logits = normal(slots)
    chosen = largest(logits, routes)
    gate = -jnp.exp(normal(1)) * routed(logits, chosen)
    return SlotStreams(normal(width), normal(width), normal(width), gate, None, chosen)


@pytest.mark.slow(days=28, group="memories and states")
def test_values_slots_and_gradients_are_those_of_dense_slots() -> None:
    """A first document that goes on from before the row, others, holes, and chunks without a token."""
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    bias, ids = normal(HEADS, SLOTS), jnp.asarray(IDS, jnp.int32)
    marks, live = mark(ids, 1), jnp.asarray(IDS > 0)[..., None, None]
    goes_on = jnp.asarray([1.0, 0.0])[:, None, None, None]
    before = Slots(normal(ROWS, HEADS, WIDTH, SLOTS) * goes_on, normal(ROWS, HEADS, SLOTS, WIDTH) * goes_on)
    streams = streams_of(ROWS, LENGTH, WIDTH, SLOTS, ROUTES)

    def run(write: Any, streams: SlotStreams) -> Any:
        (o, reads), after = write(streams)
        kept = jax.tree.map(lambda x: jnp.where(live, x, 0), (o, reads))
        return jnp.sum(jnp.sin(kept[0])) + sum(jnp.sum(x**2) for x in jax.tree.leaves(after)), (kept, after)

    dense = lambda s: write_and_read(s, bias, ids, before, CHUNK)  # noqa: E731
    few = lambda s: write_chosen(s, bias, marks, before, CHUNK)  # noqa: E731
    found, want = (
        jax.jit(jax.grad(partial(run, write), has_aux=True, allow_int=True))(streams)
        for write in (few, dense)
    )
    for one, other in zip(*map(jax.tree.leaves, (found[1], want[1])), strict=True):
        assert_close(one, other, jnp.float32, n=64)
    # The gates of other slots reach no parameter: their routes are zeros without a gradient
    written = jnp.any(jax.nn.one_hot(streams.chosen, SLOTS, dtype=bool), -2)
    for name, counts in (("q", True), ("k", True), ("v", True), ("log_gate", written)):
        own, other = (jnp.where(counts, getattr(gradient, name), 0) for gradient, _ in (found, want))
        assert_close(own, other, jnp.float32, n=256)


@pytest.mark.slow(days=28, group="costly", turn="mixers/slots/test_chosen_slots")
def test_compute_falls() -> None:
    """FLOPs of compiled programs: a chunk of 64 tokens that write to one slot each."""
    streams, marks, bias = streams_of(1, 64, 64, 1024, 1), mark(None), jnp.zeros((HEADS, 1024))
    before = Slots(jnp.zeros((1, HEADS, 64, 1024)), jnp.zeros((1, HEADS, 1024, 64)))
    dense = lambda s, x: write_and_read(s, bias, None, x, 64)  # noqa: E731
    few = lambda s, x: write_chosen(s, bias, marks, x, 64)  # noqa: E731
    compiled: Any = [jax.jit(write).lower(streams, before).compile() for write in (few, dense)]
    gathered, whole = (program.cost_analysis()["flops"] for program in compiled)
    assert gathered < 0.5 * whole
