"""The released BLT: hashes of 64 bits, and a state that goes on as the parallel pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import StackConfig
from jaxblt.models.released_blt import PolynomialHash, ReleasedBLTConfig
from jaxblt.models.released_blt.hashing import MOST_IDS, MOST_ROWS, PRIMES, hash_gram
from jaxblt.patching import PatcherConfig
from tests.parameters import drawn
from tests.tolerances import assert_close

LOCAL = {"dim": 16, "pattern": "W", "mlp_dim": 24, "scan": False}
WINDOW = {"W": AttentionConfig(dim=16, num_heads=2, num_kv_heads=1, window=5)}
CONFIG = ReleasedBLTConfig(
    encoder=StackConfig(**LOCAL, num_layers=1, mixers=WINDOW),
    latent=StackConfig(dim=24, num_layers=1, pattern="A", mixers={"A": AttentionConfig(dim=24, num_heads=2)}),
    decoder=StackConfig(**LOCAL, num_layers=2, mixers=WINDOW),
    hash=PolynomialHash(sizes=(2, 4), table_size=16),
)


def test_hashes_are_those_of_64_bit_integers():
    rng = np.random.default_rng(0)
    grams = rng.integers(0, MOST_IDS, (8, 1, 64)).astype(np.uint32)
    grams[:, :, 0] = MOST_IDS - 1
    for prime, n, size in ((PRIMES[0], 3, 500_002), (PRIMES[1], 8, MOST_ROWS), (PRIMES[6], 8, 16)):
        totals = [sum(int(g) * prime**i for i, g in enumerate(grams[:n, 0, t])) for t in range(64)]
        wrapped = [(total + 2**63) % 2**64 - 2**63 for total in totals]
        own = hash_gram(list(jnp.asarray(grams[:n])), prime, size)
        assert own[0].tolist() == [total % size for total in wrapped]


@pytest.mark.slow(days=28, group="costly", turn="models/test_released_blt")
def test_a_state_goes_on_as_the_parallel_pass_does():
    # Slots run out: bytes join the open patch beyond its longest length
    rule = PatcherConfig(threshold=1.0, max_length=3, block_size=12, capacity=3)
    # Of some drawings one byte's logits nearly cancel, so that rounding shows
    model, rng = CONFIG.build(patcher=rule), np.random.default_rng(5)
    ids = jnp.asarray(rng.integers(4, 260, (2, 24)), jnp.int32)
    entropies = jnp.asarray(rng.uniform(0, 1.5, ids.shape), jnp.float32)
    # The second row ends early, where its state stays
    segment_ids = jnp.asarray([[1] * 24, [1] * 19 + [0] * 5], jnp.int32)
    params = drawn(model, ids, entropies=entropies)
    whole, patches = jax.jit(model.apply)(params, ids, segment_ids=segment_ids, entropies=entropies)
    assert int(jnp.max(patches.lengths)) > 3
    call = jax.jit(
        lambda ids, state, segments, rated: model.apply(
            params, ids, state, segment_ids=segments, entropies=rated, method="stream"
        )
    )
    state, found = model.init_state(2, num_bytes=24), []
    for at in range(0, 24, 6):
        here = slice(at, at + 6)
        logits, state = call(ids[:, here], state, segment_ids[:, here], entropies[:, here])
        found.append(logits)
    live = np.asarray(segment_ids)[..., None] > 0
    assert_close(np.where(live, np.concatenate(found, 1), 0), np.where(live, whole, 0), n=64)


def test_a_call_in_float16_keeps_the_dtypes_of_the_state():
    """What a stack returned is kept in fp32, in which it adds up."""
    model = CONFIG.build(dtype=jnp.float16, patcher=PatcherConfig(threshold=1.0, block_size=12))
    ids, entropies = jnp.ones((2, 12), jnp.int32), jnp.zeros((2, 12))
    params = jax.eval_shape(model.init, jax.random.key(0), ids, entropies=entropies)
    state = jax.eval_shape(lambda: model.init_state(2, num_bytes=24))
    stream = partial(model.apply, segment_ids=ids, entropies=entropies, method="stream")
    _, after = jax.eval_shape(stream, params, ids, state)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    assert state.peak.dtype == state.recent.dtype == jnp.float32


def test_what_it_cannot_do_is_said():
    with pytest.raises(ValueError, match="needs the patcher that it was trained with"):
        CONFIG.build().init_state(1, num_bytes=8)
    with pytest.raises(ValueError, match="a ReleasedBLT has none: use a BLTConfig"):
        CONFIG.build(patcher=PatcherConfig(mode="learned"))
