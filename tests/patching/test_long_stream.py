"""Entropies of a long text by the demo's entropy model: chunk after chunk equals one pass over all of it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from jaxblt.data import load_sample, vocab
from jaxblt.models import init_byte_lm_state
from jaxblt.patching import byte_entropies, stream_entropies
from tests.tolerances import tol

CHUNK = 256


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(2**11, marks=pytest.mark.slow(days=28, group="costly")),
        pytest.param(2**20, marks=pytest.mark.slow(days=28, group="long")),
    ],
)
def test_chunks_equal_one_pass(length):
    config = configs.get("demo_entropy").model
    model = config.build()
    text = (load_sample("book") * (length // len(load_sample("book")) + 1))[: length - 1]
    ids = jnp.asarray(vocab.encode(text, bos=True))[None]
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), ids[:, :256]))
    # a larger table, which is the head as well: entropies differ from byte to byte
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: 25 * p if "embedding" in jax.tree_util.keystr(path) else p, params
    )

    def stream(params, ids, state, *, segment_ids):
        return model.apply(params, ids, state, segment_ids=segment_ids, method="stream")

    once = np.asarray(jax.jit(partial(byte_entropies, model.apply))(params, ids))[0]
    state = init_byte_lm_state(config, 1, capacity=length)
    found = np.asarray(jax.jit(partial(stream_entropies, stream, chunk=CHUNK))(params, ids, state))[0]
    assert found.shape == (length,)
    assert once.std() > 0.1
    np.testing.assert_allclose(found, once, **tol(jnp.float32, n=config.vocab_size))
    alone = np.asarray(jax.jit(partial(byte_entropies, model.apply))(params, ids[:, -CHUNK:]))[0]
    assert np.abs(alone[:32] - once[-CHUNK:][:32]).max() > 0.01, "what went before should matter to a chunk"
