"""Calls that look at more bytes than they keep, from any byte of a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.inference import Decoder, init_decoder
from jaxblt.inference.decode import decode_bytes
from jaxblt.mixers import call_keeping
from jaxblt.models import ByteLMConfig
from tests.inference.test_prefill import BLOCK, GRAMS, LOCAL, compare, decoding, feed, unboxed
from tests.tolerances import assert_close

TOTAL, WIDTH, ROWS = 45, 8, 4


def byte_model():
    config = ByteLMConfig(stack=LOCAL, hash=GRAMS)
    return Decoder(config), {"model": unboxed(config, jnp.ones((1, 8), jnp.int32))}


read = jax.jit(decode_bytes, static_argnums=0)


def look(decoder, params, state, ids, seen, keep):
    call = lambda ids, state, segments: read(decoder, params, ids, state, segments)  # noqa: E731
    ids, seen, keep = (jnp.asarray(x, jnp.int32) for x in (ids, seen, keep))
    return call_keeping(call, ids, state, seen, keep)


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize("name", ["bytes", "patches"])
def test_what_is_kept_is_the_state_of_these_bytes(name):
    """Rows keep 0 to 8 bytes a call, up to the edges of their blocks, and see others behind them."""
    decoder, params = byte_model() if name == "bytes" else decoding("entropy", "HA")
    rng = np.random.default_rng(5)
    ids, segments = rng.integers(4, 260, (ROWS, TOTAL)), np.ones((ROWS, TOTAL), np.int32)
    start = init_decoder(decoder, ROWS, num_bytes=TOTAL)
    logits, closed, expected = feed(decoder, params, start, jnp.asarray(ids), jnp.asarray(segments))
    state, at, counts = start, np.zeros(ROWS, int), set()
    while (at < TOTAL).any():
        room = np.minimum(np.minimum(WIDTH, TOTAL - at), BLOCK - at % BLOCK)
        keep = rng.integers(0, room + 1)
        counts |= set(keep.tolist())
        span = np.minimum(at[:, None] + np.arange(WIDTH), TOTAL - 1)
        seen = np.arange(WIDTH) < room[:, None]
        taken = np.arange(WIDTH) < keep[:, None]
        given = np.where(taken, np.take_along_axis(ids, span, 1), rng.integers(4, 260, span.shape))
        found, state = look(decoder, params, state, given, seen, keep)
        wanted = np.take_along_axis(np.asarray(logits), span[..., None], 1)
        assert_close(np.asarray(found)[taken], wanted[taken], n=1024)
        at += keep
    assert counts == set(range(WIDTH + 1))
    compare(state, expected)
    assert name == "bytes" or np.asarray(closed).sum(1).min() > 4


@pytest.mark.slow(days=28, group="decoding")
def test_a_row_beyond_the_edge_of_its_block_is_not_answered():
    decoder, params = decoding("entropy", "HA")
    state = init_decoder(decoder, ROWS, num_bytes=TOTAL)
    ids, every = np.full((ROWS, WIDTH), 70), np.ones((ROWS, WIDTH))
    for keep in (WIDTH, WIDTH - 1):
        found, state = look(decoder, params, state, ids, every, np.full(ROWS, keep))
        assert np.isfinite(found).all()
    assert np.isnan(look(decoder, params, state, ids, every, np.zeros(ROWS))[0]).all()
