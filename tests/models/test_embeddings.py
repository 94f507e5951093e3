"""Hashed n-grams against a loop over bytes, documents apart, and streaming."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.models.embeddings import (
    ByteEmbedding,
    EmbeddingConfig,
    HashConfig,
    init_embedding_state,
    ngram_hashes,
)

CONFIG = HashConfig(sizes=(3, 5), table_size=101)
A = 0x9E3779B1


def naive_row(grams: list[int], table_size: int) -> int:
    total = sum((g * pow(A, i, 2**32)) % 2**32 for i, g in enumerate(reversed(grams))) % 2**32
    total = ((total ^ (total >> 16)) * 0x85EBCA6B) % 2**32
    total = ((total ^ (total >> 13)) * 0xC2B2AE35) % 2**32
    return (total ^ (total >> 16)) % table_size


def hashes(ids, run=None):
    history = jnp.zeros((ids.shape[0], CONFIG.reach), jnp.uint32)
    return np.asarray(ngram_hashes(CONFIG, jnp.asarray(ids), history, run))


def test_rows_equal_a_loop_over_bytes():
    ids = np.random.default_rng(0).integers(0, 260, (2, 19)).astype(np.int32)
    got = hashes(ids)
    for b in range(2):
        padded = [0] * CONFIG.reach + [int(i) + 1 for i in ids[b]]
        for t in range(19):
            for g, n in enumerate(CONFIG.sizes):
                assert got[b, t, g] == naive_row(padded[t + CONFIG.reach - n + 1 : t + CONFIG.reach + 1], 101)


def test_ngrams_stop_at_the_document():
    ids = np.random.default_rng(1).integers(0, 260, (1, 12)).astype(np.int32)
    run = jnp.array([[0] * 5 + [1] * 7])
    np.testing.assert_array_equal(hashes(ids, run)[:, 5:], hashes(ids[:, 5:]))


def test_collisions_are_as_many_as_chance_makes():
    config = HashConfig(sizes=(8,), table_size=4096)
    grams = 4000
    ids = np.random.default_rng(2).integers(0, 260, (grams, 8)).astype(np.int32)
    history = jnp.zeros((grams, config.reach), jnp.uint32)
    rows = np.asarray(ngram_hashes(config, jnp.asarray(ids), history, None))[:, -1, 0]
    expected = 4096 * (1 - (1 - 1 / 4096) ** grams)
    deviation = np.sqrt(4096 * np.exp(-grams / 4096) * (1 - np.exp(-grams / 4096)))
    assert abs(len(set(rows.tolist())) - expected) < 4 * deviation


@pytest.mark.parametrize("split", [1, 4, 13])
def test_streaming_equals_one_call(split):
    config = EmbeddingConfig(dim=8, hash=CONFIG)
    module = ByteEmbedding(config)
    ids = jnp.asarray(np.random.default_rng(3).integers(4, 260, (2, 13)), jnp.int32)
    segments = jnp.asarray([[1] * 6 + [2] * 7, [3] * 13], jnp.int32)
    variables = module.init(jax.random.key(0), ids)
    whole, _ = module.apply(variables, ids, segment_ids=segments)
    state, parts = init_embedding_state(config, 2), []
    for start in range(0, 13, split):
        stop = start + split
        part, state = module.apply(
            variables, ids[:, start:stop], segment_ids=segments[:, start:stop], state=state
        )
        parts.append(part)
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(jnp.concatenate(parts, 1)))


def test_no_byte_changes_nothing_in_the_state():
    config = EmbeddingConfig(dim=8, hash=CONFIG)
    module = ByteEmbedding(config)
    ids = jnp.asarray([[10, 20, 30], [40, 50, 60]], jnp.int32)
    variables = module.init(jax.random.key(0), ids)
    _, state = module.apply(
        variables, ids, segment_ids=jnp.ones((2, 3), jnp.int32), state=init_embedding_state(config, 2)
    )
    _, after = module.apply(variables, ids, segment_ids=jnp.asarray([[0, 0, 0], [1, 1, 0]]), state=state)
    np.testing.assert_array_equal(np.asarray(state[1][0]), np.asarray(after[1][0]))
    assert not np.array_equal(np.asarray(state[1][1]), np.asarray(after[1][1]))
