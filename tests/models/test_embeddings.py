"""Byte embeddings with hashed n-grams: what streams, and what leaves the state alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.embeddings import (
    ByteEmbedding,
    EmbeddingConfig,
    HashConfig,
    init_embedding_state,
)
from tests.parameters import drawn

CONFIG = HashConfig(sizes=(3, 5), table_size=101)


@pytest.mark.slow(days=28, group="costly", turn="models/test_embeddings")
@pytest.mark.parametrize("split", [1, 4, 13])
def test_streaming_equals_one_call(split):
    config = EmbeddingConfig(dim=8, hash=CONFIG)
    module = ByteEmbedding(config)
    ids = np.random.default_rng(3).integers(4, 260, (2, 13)).astype(np.int32)
    segments = np.array([[1] * 6 + [2] * 7, [3] * 13], np.int32)
    variables, apply = drawn(module, ids), jax.jit(module.apply)
    whole, _ = apply(variables, ids, segment_ids=segments)
    state, parts = init_embedding_state(config, 2), []
    for start in range(0, 13, split):
        stop = start + split
        part, state = apply(variables, ids[:, start:stop], segment_ids=segments[:, start:stop], state=state)
        parts.append(np.asarray(part))
    np.testing.assert_array_equal(np.asarray(whole), np.concatenate(parts, 1))


@pytest.mark.slow(days=28, group="costly")
def test_no_byte_changes_nothing_in_the_state():
    config = EmbeddingConfig(dim=8, hash=CONFIG)
    module = ByteEmbedding(config)
    ids = jnp.asarray([[10, 20, 30], [40, 50, 60]], jnp.int32)
    variables, apply = drawn(module, ids), jax.jit(module.apply)
    _, state = apply(
        variables, ids, segment_ids=jnp.ones((2, 3), jnp.int32), state=init_embedding_state(config, 2)
    )
    _, after = apply(variables, ids, segment_ids=jnp.asarray([[0, 0, 0], [1, 1, 0]]), state=state)
    np.testing.assert_array_equal(np.asarray(state[1][0]), np.asarray(after[1][0]))
    assert not np.array_equal(np.asarray(state[1][1]), np.asarray(after[1][1]))


@pytest.mark.parametrize(("of", "given"), [(CONFIG, None), (None, CONFIG)])
def test_the_state_of_another_config_is_refused(of: HashConfig | None, given: HashConfig | None) -> None:
    """Without n-grams there is no state, as in training: each call would begin its n-grams anew."""
    stack = StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=0)
    module = ByteLMConfig(stack=stack, hash=of).build()
    state = ByteLMConfig(stack=stack, hash=given).build().init_state(2, num_bytes=8)
    ids = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match="make it by init_state of the same config"):
        jax.eval_shape(
            lambda key: module.init_with_output(key, ids, state, method="stream"), jax.random.key(0)
        )
