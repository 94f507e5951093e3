import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import encode
from jaxblt.patching import PatcherConfig, closes
from jaxblt.patching.rules import candidates
from jaxblt.patching.segment import closes_at
from tests.patching.cases import EVERY, SIZE, config_of, patch
from tests.patching.naive import naive_closed, naive_starts
from tests.patching.rows import random_rows


def test_words_are_ascii_letters_digits_and_bytes_of_longer_characters():
    """Every id, each in a block of its own: patches end behind what is in no word."""
    config = PatcherConfig(mode="space", block_size=2)
    ids = np.stack([np.arange(260), np.full(260, encode(b"a", eos=False)[-1])], 1).astype(np.int32)
    cut = jax.jit(lambda ids: closes(config, ids, None, jnp.ones(ids.shape, jnp.int32)))
    ended = np.asarray(cut(ids))[:, 0]
    inside = [False] * 4 + [byte >= 0x80 or chr(byte).isalnum() for byte in range(256)]
    assert ended.tolist() == [not word for word in inside]


def test_a_rise_exceeds_what_the_dual_rule_asks():
    config = PatcherConfig(mode="entropy", threshold=0.5, threshold_add=0.25)
    entropies, before = jnp.array([0.75, 0.875]), jnp.array([0.5, 0.5])
    place = {"first": jnp.zeros(2, bool), "offset": jnp.arange(2, dtype=jnp.int32), "ids": jnp.full(2, 40)}
    found = candidates(config, entropies=entropies, previous=before, threshold=jnp.float32(0.5), **place)
    assert found.tolist() == [False, True]


@pytest.fixture(scope="module")
def sample():
    return random_rows(1, rows=4, blocks=4, block_size=SIZE)


@pytest.mark.parametrize(("rule", "limit"), EVERY)
def test_equal_to_a_walk_along_the_bytes(sample, rule, limit):
    ids, entropies, segments = sample
    config = config_of(rule, limit)
    patches = patch(config, ids, segment_ids=segments, entropies=entropies)
    for row in range(len(ids)):
        closed, begins = naive_closed(config, ids[row], entropies[row], segments[row])
        np.testing.assert_array_equal(np.ravel(patches.closed[row]), closed)
        starts = naive_starts(closed, begins, segments[row])
        at = np.asarray(patches.starts[row] + SIZE * np.arange(4)[:, None])
        assert at[np.asarray(patches.lengths[row]) > 0].tolist() == starts
    assert int(patches.lengths.sum()) == int((segments > 0).sum())
    if config.capacity is None:
        assert int(patches.overflow.sum()) == 0


@pytest.mark.parametrize(("rule", "limit"), [("entropy", "both"), ("greedy", "both"), ("byte", "equal"),
                                             ("monotonic", "max"), ("space", "min")])  # fmt: skip
def test_lengths_are_within_their_limits(sample, rule, limit):
    ids, entropies, segments = sample
    config = config_of(rule, limit)
    lengths = np.asarray(patch(config, ids, segment_ids=segments, entropies=entropies).lengths)
    assert lengths.max() <= config.longest
    last = (lengths > 0) & ~np.pad(lengths > 0, ((0, 0), (0, 0), (0, 1)))[..., 1:]
    assert lengths[(lengths > 0) & ~last].min() >= config.min_length


@pytest.mark.slow(days=21, every="entropy-free")
@pytest.mark.parametrize(("rule", "limit"), [("entropy", "free"), ("dual", "max"), ("monotonic", "both"),
                                             ("greedy", "both"), ("space", "min")])  # fmt: skip
def test_boundaries_do_not_read_the_future(sample, rule, limit):
    ids, entropies, _ = sample
    config = config_of(rule, limit)
    segments = np.ones_like(ids)
    before = np.asarray(patch(config, ids, segment_ids=segments, entropies=entropies).closed).reshape(
        ids.shape
    )
    rng = np.random.default_rng(3)
    changed = 0
    for t in range(2 * SIZE + 1):
        later = (np.arange(ids.shape[1]) > t)[None]
        other_ids = np.where(later, rng.integers(4, 260, ids.shape), ids).astype(np.int32)
        other = np.where(later, rng.uniform(0, 5.5, ids.shape), entropies).astype(np.float32)
        after = patch(config, other_ids, segment_ids=segments, entropies=other).closed
        differs = np.asarray(after).reshape(ids.shape) != before
        assert not differs[:, : t + 1].any()
        changed += int(differs.sum())
    assert changed > 0


@pytest.mark.slow(days=21, every="entropy")
@pytest.mark.parametrize("rule", ["entropy", "monotonic", "dual", "greedy", "space", "static"])
def test_packed_is_apart(sample, rule):
    ids, entropies, _ = sample
    config = config_of(rule, "both")
    segments = np.repeat(np.array([1, 2], np.int32), [SIZE, 3 * SIZE])[None] * np.ones_like(ids)
    segments[:, -7:] = 0
    packed = patch(config, ids, segment_ids=segments, entropies=entropies)
    # The second document moved to the start of the row.
    roll = lambda x: np.roll(x, -SIZE, axis=1)  # noqa: E731
    alone = np.where(roll(segments) == 2, 1, 0).astype(np.int32)
    alone = patch(config, roll(ids), segment_ids=alone, entropies=roll(entropies))
    for name in ("patch_ids", "closed", "starts", "lengths"):
        np.testing.assert_array_equal(getattr(packed, name)[:, 1:], getattr(alone, name)[:, :3])


def test_the_published_rule():
    """Starts {0, 1} ∪ {t + 1: H_t > threshold}, long patches split afterwards (facebook's description of
    BLT)."""
    rng = np.random.default_rng(5)
    entropies = rng.uniform(0, 3, (1, 64)).astype(np.float32)
    ids = np.zeros((1, 64), np.int32) + 70
    starts = sorted({0, 1} | {t + 1 for t in range(63) if entropies[0, t] > 1.335442066192627})
    split = sorted({at for a, b in zip(starts, [*starts[1:], 64], strict=True) for at in range(a, b, 6)})
    for expected, longest in ((starts, None), (split, 6)):
        config = PatcherConfig(threshold=1.335442066192627, block_size=64, max_length=longest)
        found = np.asarray(patch(config, ids, entropies=entropies).starts)
        assert found[found < 64].tolist() == expected


@pytest.mark.slow(days=21)
@pytest.mark.parametrize(("rule", "limit"), [("entropy", "both"), ("monotonic", "max"), ("dual", "max"),
                                             ("greedy", "both")])  # fmt: skip
def test_patches_get_fewer_as_the_threshold_rises(sample, rule, limit):
    config = config_of(rule, limit)
    sweep = jax.jit(jax.vmap(functools.partial(closes_at, config, *map(jnp.asarray, sample))))
    counts = sweep(jnp.linspace(0.0, 8.0, 33)).sum((1, 2)).tolist()
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


GOLDEN_TEXT = b"Ab, c\xc3\xa9 42!"
GOLDEN_ENTROPIES = [3.0, 1.0, 2.5, 2.0, 0.5, 3.0, 3.5, 0.0, 1.5, 2.0, 4.0, 1.0, 5.0]
GOLDEN = {
    # BOS A b , ␣ c C3 A9 ␣ 4 2 ! EOS; a patch ends where there is a 1.
    "entropy 2": ({"threshold": 2.0}, "1010011000101"),
    "entropy 5": ({"threshold": 5.0}, "1000000000000"),
    "entropy 2 min 2": ({"threshold": 2.0, "min_length": 2}, "0010010000101"),
    "entropy 2 max 3": ({"threshold": 2.0, "max_length": 3}, "1010011001101"),
    "monotonic .5": ({"threshold": 0.5, "monotonic": True}, "1010010010101"),
    "dual 2 .25": ({"threshold": 2.0, "threshold_add": 0.25}, "1010010000101"),
    "dual 1 .25": ({"threshold": 1.0, "threshold_add": 0.25}, "1010010010101"),
    "greedy 4": ({"mode": "greedy", "threshold": 4.0}, "0010010010101"),
    "greedy 4 max 2": ({"mode": "greedy", "threshold": 4.0, "max_length": 2}, "0101010101011"),
    "space": ({"mode": "space"}, "1001100010011"),
    "space min 2": ({"mode": "space", "min_length": 2}, "0001000010010"),
    "static 4": ({"mode": "static", "patch_size": 4}, "0001000100010"),
    "byte": ({"mode": "byte"}, "1111111111111"),
    "entropy 2, 3 slots": ({"threshold": 2.0, "capacity": 3}, "1010000000000"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    options, expected = GOLDEN[name]
    ids = encode(GOLDEN_TEXT, bos=True, eos=True)[None]
    config = PatcherConfig(**options, block_size=16)
    patches = patch(config, jnp.asarray(ids), entropies=jnp.asarray([GOLDEN_ENTROPIES], jnp.float32))
    assert "".join("01"[int(c)] for c in np.ravel(patches.closed)[:13]) == expected
    assert int(patches.lengths.sum()) == 13


def test_without_bos_and_eos():
    """Specials are bytes like others: without them the text's own first byte is the document's first."""
    ids = encode(GOLDEN_TEXT)[None]
    cut = jax.jit(functools.partial(closes, PatcherConfig(threshold=2.0, block_size=16)))
    closed = np.asarray(
        cut(ids, np.array([GOLDEN_ENTROPIES[1:-1]], np.float32), np.ones(ids.shape, np.int32))
    )
    assert "".join("01"[int(c)] for c in closed[0]) == "11001100010"


def test_budget_of_a_block_of_most_surprise():
    """4096 bytes of ln 260 nats: the fixed-point sums stay inside int32, whatever the budget."""
    entropies = jnp.full((1, 4096), np.log(260.0), jnp.float32)
    ids = jnp.zeros((1, 4096), jnp.int32)
    budget = jax.jit(functools.partial(closes_at, PatcherConfig(mode="greedy", threshold=0.0)))
    for threshold, count in ((55.0, 410), (20_000.0, 2), (1e6, 1)):
        closed = budget(ids, entropies, jnp.ones_like(ids), jnp.float32(threshold))
        assert int(closed.sum()) == count
