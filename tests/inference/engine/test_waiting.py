"""Rows that wait for the latent stack of each other get what they get alone, in fewer runs of it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.inference import Decoder, init_decoder
from jaxblt.inference.waiting import MOST_STEPS, SHARE, none_waiting, step_or_wait
from jaxblt.models import BLTConfig, ByteLMConfig
from jaxblt.models.level import LevelConfig
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from tests.inference.engine.conftest import ONE

ROWS, BYTES = 6, 24
STEPS = BYTES * (1 + MOST_STEPS)


@partial(jax.jit, static_argnums=0)
def follow(decoder, params, ids, limits):
    """Read the first bytes of each row; tell of each step what it read, finished and ran."""

    def body(carry, _):
        state, waiting, place = carry
        held, draws = waiting.rows, ~waiting.rows & (place < limits)
        column = jnp.take_along_axis(ids, jnp.minimum(place, BYTES - 1)[:, None], 1)[:, 0]
        segment_ids = jnp.where(held | draws, 1, 0)
        logits, closed, state, waiting = step_or_wait(decoder, params, column, state, segment_ids, waiting)
        at_edge = held | (draws & closed)
        told = {"logits": logits, "draws": draws, "closed": draws & closed, "steps": waiting.steps}
        told |= {"ready": (held | draws) & ~waiting.rows, "ran": jnp.any(at_edge & ~waiting.rows)}
        told |= {"at_edge": jnp.sum(at_edge), "live": jnp.sum(held | draws)}
        return (state, waiting, place + draws.astype(jnp.int32)), told

    start = (init_decoder(decoder, ROWS, num_bytes=64), none_waiting(decoder, ROWS), jnp.zeros_like(limits))
    return jax.lax.scan(body, start, None, length=STEPS)[1]


@pytest.fixture(scope="module")
def read(runs):
    run, ids = runs["patches"], np.random.default_rng(3).integers(4, 260, (ROWS, BYTES)).astype(np.int32)

    def call(limits):
        told = follow(run.decoder, run.decoder_params, ids, np.asarray(limits, np.int32))
        return {name: np.asarray(found) for name, found in told.items()}

    return call


@pytest.fixture(scope="module")
def alone(read):
    """What each row gets while no other has a byte."""
    return [read([BYTES if i == row else 0 for i in range(ROWS)]) for row in range(ROWS)]


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_waiting")
@settings(max_examples=8)
@given(st.lists(st.integers(0, BYTES), min_size=ROWS, max_size=ROWS))
def test_rows_get_what_they_get_alone(read, alone, limits):
    found = read(limits)
    assert found["draws"].sum(0).tolist() == found["ready"].sum(0).tolist() == limits
    assert found["steps"].max() <= MOST_STEPS
    for row, (own, limit) in enumerate(zip(alone, limits, strict=True)):
        for told, when in (("logits", "ready"), ("closed", "draws")):
            expected, got = (x[told][x[when][:, row], row] for x in (own, found))
            np.testing.assert_array_equal(got, expected[:limit])


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_waiting")
def test_a_row_alone_never_waits(alone):
    for row, own in enumerate(alone):
        assert own["draws"][:BYTES, row].all()
        assert own["steps"].max() == 0


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_waiting")
def test_the_latent_stack_runs_less_often_and_for_most_rows(read, alone):
    """Without waiting it runs at each byte with which the patch of any row closes."""
    found = read([BYTES] * ROWS)
    closed = np.stack([own["closed"][:BYTES, row] for row, own in enumerate(alone)])
    assert found["closed"].sum() == closed.sum()
    assert found["ran"].sum() < 0.8 * closed.any(0).sum()
    early = found["ran"] & (found["at_edge"] < SHARE * found["live"])
    waited = np.pad(found["steps"][:-1].max(1), (1, 0))
    assert (waited[early] == MOST_STEPS - 1).all()


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_waiting")
def test_where_no_row_waits(runs):
    decoder = runs["patches"].decoder
    assert none_waiting(decoder, 1) is None
    assert none_waiting(Decoder(ByteLMConfig(stack=ONE)), 4) is None


LEARNED = {"features_enter": "output", "router": BoundaryConfig()}
LEVEL = LevelConfig(encoder=ONE, decoder=ONE)


@pytest.mark.slow(days=28, group="costly", every="levels")
@pytest.mark.parametrize(
    ("patcher", "options"),
    [
        (PatcherConfig(mode="static", block_size=32), {}),
        (PatcherConfig(mode="learned", target=3.0, block_size=32), LEARNED),
        (PatcherConfig(mode="learned", target=3.0, block_size=32), LEARNED | {"level": LEVEL}),
    ],
    ids=["static", "learned", "levels"],
)
def test_a_step_in_float16_keeps_the_dtypes_of_what_it_carries(patcher, options):
    """A loop refuses others; and what a stack returned, it adds up in fp32, so that it may exceed 65,504."""
    decoder = Decoder(BLTConfig(ONE, ONE, ONE, hash=None, **options), patcher, dtype=jnp.float16)
    shapes = jax.eval_shape(decoder.build().init, jax.random.key(0), jnp.zeros((2, 32), jnp.int32))
    carried = jax.eval_shape(lambda: (init_decoder(decoder, 2, num_bytes=64), none_waiting(decoder, 2)))
    params, ids = {"model": nn.meta.unbox(shapes)["params"]}, jnp.ones((2,), jnp.int32)
    after = jax.eval_shape(partial(step_or_wait, decoder), params, ids, carried[0], ids, carried[1])[2:]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), carried
    )
    assert carried[0].model.recent.dtype == carried[1].byte.h.dtype == jnp.float32
