"""Entropies in bounded contexts: one definition, however a document is cut, streamed or packed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, HashConfig, StackConfig, init_byte_lm_state
from jaxblt.patching import byte_entropies, init_contexts, next_entropies, stream_entropies
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import tol

CONTEXT, LENGTH = 16, 75
STACK = StackConfig(
    dim=16,
    num_layers=2,
    pattern="WA",
    mlp_dim=0,
    mixers=table(attention=AttentionConfig(dim=16, num_heads=2), window=4),
)
CONFIG = ByteLMConfig(stack=STACK, hash=HashConfig(sizes=(3,), table_size=64))
MODEL = CONFIG.build()
TOLERANCE = tol(jnp.float32, n=1024)


def apply(params, ids, state, *, segment_ids):
    return MODEL.apply(params, ids, state, segment_ids=segment_ids, method="stream")


@cache
def start(rows):
    init = lambda rows, capacity: init_byte_lm_state(CONFIG, rows, capacity=capacity)  # noqa: E731
    return init_contexts(init, rows, LENGTH, CONTEXT)


one_pass = jax.jit(partial(byte_entropies, MODEL.apply))
call = jax.jit(partial(next_entropies, apply, context=CONTEXT))
in_chunks = jax.jit(partial(stream_entropies, apply, context=CONTEXT), static_argnames="chunk")


def stream(params, ids, segments=None, *, chunk=40):
    """Entropies of two rows; ids are given in any case, for one program a chunk."""
    segments = np.ones(ids.shape, np.int32) if segments is None else segments
    return np.asarray(in_chunks(params, ids, start(2), segment_ids=segments, chunk=chunk))


@pytest.fixture(scope="module")
def model():
    ids = np.random.default_rng(0).integers(4, 260, (2, LENGTH)).astype(np.int32)
    return drawn(MODEL, ids), ids


def by_hand(params, ids):
    """A window at a time, as the definition says: the first is read whole, the others from their middle on."""
    found, half = np.zeros(ids.shape, np.float32), CONTEXT // 2
    for first in range(0, ids.shape[1], half):
        window = np.pad(
            ids[:, first : first + CONTEXT], ((0, 0), (0, max(0, first + CONTEXT - ids.shape[1])))
        )
        values = np.asarray(one_pass(params, window))
        begin = first + half if first else 0
        end = min(first + CONTEXT, ids.shape[1])
        if begin < end:
            found[:, begin:end] = values[:, begin - first : end - first]
    return found


@pytest.mark.slow(days=28, group="costly", turn="patching/test_contexts")
def test_a_stream_in_any_chunks_is_what_the_definition_says(model):
    params, ids = model
    expected = by_hand(params, ids)
    for chunk in (7, 40):
        np.testing.assert_allclose(stream(params, ids, chunk=chunk), expected, **TOLERANCE)
    unbounded = np.asarray(one_pass(params, ids))
    np.testing.assert_allclose(expected[:, :CONTEXT], unbounded[:, :CONTEXT], **TOLERANCE)
    assert np.abs(expected - unbounded)[:, CONTEXT:].max() > 1e-3, "the bound should matter to this model"


@pytest.mark.slow(days=28, group="costly", turn="patching/test_contexts")
def test_rows_advance_on_their_own_byte_by_byte(model):
    params, ids = model
    expected = stream(params, ids)
    rng, at, state = np.random.default_rng(1), np.zeros(2, int), start(2)
    found = np.zeros(ids.shape, np.float32)
    while (at < LENGTH).any():
        go = (rng.random(2) < 0.7) & (at < LENGTH)
        here = np.minimum(at, LENGTH - 1)
        values, state = call(params, ids[np.arange(2), here][:, None], state, go[:, None].astype(np.int32))
        found[np.flatnonzero(go), at[go]] = np.asarray(values)[go, 0]
        at = at + go
    np.testing.assert_allclose(found, expected, **TOLERANCE)


def test_documents_of_a_row_count_from_their_own_first_byte(model):
    params, ids = model
    segments = np.ones(ids.shape, np.int32)
    segments[0, 29:], segments[1, 60:] = 2, 0
    found, expected = stream(params, ids, segments), stream(params, ids)
    np.testing.assert_allclose(found[0, :29], expected[0, :29], **TOLERANCE)
    np.testing.assert_allclose(found[1, :60], expected[1, :60], **TOLERANCE)
    assert not found[1, 60:].any()
    alone = by_hand(params, ids[:, 29:])
    np.testing.assert_allclose(found[0, 29:], alone[0], **TOLERANCE)


def test_the_bytes_that_a_prediction_depends_on(model):
    windows = ByteLMConfig(
        stack=StackConfig(num_layers=3, pattern="W", mixers={"W": AttentionConfig(dim=64, window=4)}),
        hash=HashConfig(sizes=(3,)),
    )
    assert windows.receptive_field == 3 * 3 + 2
    assert CONFIG.receptive_field is None


def test_a_context_has_two_halves():
    with pytest.raises(ValueError, match="an even number of bytes, at least 2, got 15"):
        init_contexts(lambda rows, capacity: None, 1, 8, 15)
