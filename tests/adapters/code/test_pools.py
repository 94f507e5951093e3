"""What a router carries of a document: the next document begins without it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters.code.pools import ChunkSums, ChunkwiseSums, Smooth
from jaxblt.mixers.driver.marks import mark
from tests.tolerances import assert_close

IDS = jnp.asarray([[1, 1, 2, 2, 2]], jnp.int32)
TIME = jnp.asarray([[3, 4, 0, 1, 2]], jnp.int32)
ONES = jnp.ones((1, 5, 1), jnp.float32)
CORES = {
    "chunks": (ChunkSums(size=4, lag=2), (2.0 * ONES, TIME)),
    "smooth": (Smooth(), (0.5 * ONES, ONES)),
}


@pytest.mark.parametrize("entered", [True, False], ids=["by a call", "by a device"])
@pytest.mark.parametrize("name", CORES)
def test_nan_stays_in_its_document(name: str, entered: bool) -> None:
    """Of the first of two documents in a stretch, which began before it, in a call with a state or on a device."""
    core, streams = CORES[name]
    carry = core.zero(streams)

    @jax.jit
    def after(carry):
        summary = core.run(streams, mark(IDS, 1), carry if entered else None)[1]
        return core.join(carry, summary)

    poisoned = jax.tree.map(lambda x: x + jnp.nan, carry)
    jax.tree.map(np.testing.assert_array_equal, after(poisoned), after(carry))


@pytest.mark.parametrize("lag", [1, 2])
def test_aligned_chunks_have_the_sums_of_running_ones(lag: int) -> None:
    """Documents of 14, 3 and 5 tokens at multiples of 4, one with a hole at a chunk's start; prefixes of 6."""
    ids = np.array([[1] * 4 + [-1] + [1] * 9 + [0] * 2 + [2] * 3 + [0] + [3] * 5 + [0]], np.int32)
    starts = {1: 0, 2: 16, 3: 20}
    time = np.array([[t - starts.get(abs(s), t) for t, s in enumerate(ids[0])]], np.int32)
    rng = np.random.default_rng(0)
    held = (ids > 0)[..., None].astype(np.float32)
    h = rng.standard_normal((1, ids.shape[1], 3)).astype(np.float32) * held
    weights = rng.uniform(0.5, 2, held.shape).astype(np.float32) * held * (time < 6)[..., None]

    @partial(jax.jit, static_argnums=0)
    def sums(aligned: bool, h: Any) -> Any:
        marks = mark(jax.device_put(ids), 4)
        chunk, _ = ChunkSums(size=4, lag=lag, aligned=aligned).run((h, jax.device_put(time)), marks, None)
        core = ChunkwiseSums(4) if aligned else Smooth()
        keep = jnp.where(jax.device_put(time) == 0, 0.0, 1.0)[..., None]
        prefix, _ = core.run((keep, h * jax.device_put(weights)), marks, None)
        return chunk, prefix

    told = ids != 0, (ids != 0) & (time >= 6)
    for found, expected, at in zip(sums(True, h), sums(False, h), told, strict=True):
        assert_close(np.asarray(found)[at], np.asarray(expected)[at], n=8)
