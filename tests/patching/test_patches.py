import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.patching import bytes_per_patch, from_closed
from jaxblt.patching.patches import to_blocks
from tests.patching.rows import random_rows

SIZE = 12
group = jax.jit(from_closed, static_argnames=("block_size", "capacity"))


@pytest.fixture(scope="module")
def sample():
    _, entropies, segments = random_rows(0, rows=6, blocks=4, block_size=SIZE)
    return entropies > 3.0, segments


def naive_slots(closed: np.ndarray, segments: np.ndarray, capacity: int) -> dict[str, np.ndarray]:
    """One block, byte by byte."""
    size = len(closed)
    ids, starts = np.full(size, capacity), np.full(capacity, size)
    lengths, real = np.zeros(capacity, int), np.zeros(size, bool)
    slot, refused = -1, 0
    opening = True
    for t in range(size):
        if segments[t] == 0:
            continue
        if opening:
            slot += 1
            starts[slot] = t
        ids[t] = slot
        lengths[slot] += 1
        wanted = bool(closed[t]) or t == size - 1
        opening = wanted and (slot + 1 < capacity or t == size - 1)
        real[t] = opening
        refused += wanted and not opening
    holes = np.where(lengths > 0, segments[0], -segments[0])
    return {
        "patch_ids": ids, "closed": real, "starts": starts, "lengths": lengths, "segment_ids": holes,
        "overflow": np.array(refused),
    }  # fmt: skip


@pytest.mark.parametrize("capacity", [1, 3, SIZE])
def test_slots_match_a_walk_along_the_bytes(sample, capacity):
    closed, segments = sample
    # A row that does not fill its last block.
    closed, segments = closed[:, :-5], segments[:, :-5]
    patches = group(jnp.asarray(closed), jnp.asarray(segments), block_size=SIZE, capacity=capacity)
    assert (patches.block_size, patches.capacity, patches.num_bytes) == (SIZE, capacity, closed.shape[1])
    for row in range(closed.shape[0]):
        for block in range(4):
            part = np.s_[row, block * SIZE : (block + 1) * SIZE]
            fill = SIZE - len(closed[part])
            expected = naive_slots(
                np.pad(closed[part], (0, fill)), np.pad(segments[part], (0, fill)), capacity
            )
            for name, value in expected.items():
                np.testing.assert_array_equal(getattr(patches, name)[row, block], value, err_msg=name)


@pytest.mark.parametrize("capacity", [2, SIZE])
def test_lengths_sum_to_the_bytes_and_slots_fill_from_the_left(sample, capacity):
    closed, segments = sample
    patches = group(jnp.asarray(closed), jnp.asarray(segments), block_size=SIZE, capacity=capacity)
    assert int(patches.lengths.sum()) == int((segments > 0).sum())
    real = np.asarray(patches.lengths > 0)
    assert not (real[..., 1:] & ~real[..., :-1]).any()
    wanted = np.asarray(to_blocks(jnp.asarray(closed & (segments > 0)), SIZE)).copy()
    wanted[..., -1] = np.asarray(patches.patch_ids[..., -1]) < capacity
    assert int(wanted.sum()) == int(patches.closed.sum()) + int(patches.overflow.sum())
    assert (int(patches.overflow.sum()) == 0) == (capacity == SIZE)


def test_bytes_per_patch_counts_real_patches():
    closed = jnp.asarray([[False, True, False, False, False, True, False, False]])
    patches = group(closed, jnp.asarray([[1, 1, 1, 1, 1, 1, 1, 0]]), block_size=4, capacity=4)
    np.testing.assert_array_equal(patches.lengths[0], [[2, 2, 0, 0], [2, 1, 0, 0]])
    assert float(bytes_per_patch(patches)) == 1.75


@pytest.mark.slow(days=28, group="costly")
def test_a_pytree_with_static_shapes_under_jit(sample):
    closed, segments = (jnp.asarray(x) for x in sample)
    jax.tree.map(
        np.testing.assert_array_equal,
        group(closed, segments, block_size=SIZE, capacity=4),
        from_closed(closed, segments, block_size=SIZE, capacity=4),
    )


@pytest.mark.parametrize("capacity", [0, 5])
def test_capacity_out_of_range(capacity):
    with pytest.raises(ValueError, match=r"1\.\.block_size = 4"):
        from_closed(jnp.ones((1, 4), bool), jnp.ones((1, 4), jnp.int32), block_size=4, capacity=capacity)


def test_a_document_that_begins_inside_a_block_begins_a_patch():
    segments = jnp.asarray([[1] * 3 + [2] * 5], jnp.int32)
    patches = group(jnp.zeros((1, 8), bool), segments, block_size=8, capacity=4)
    np.testing.assert_array_equal(patches.patch_ids[0, 0], [0] * 3 + [1] * 5)
    np.testing.assert_array_equal(patches.lengths[0, 0], [3, 5, 0, 0])
    np.testing.assert_array_equal(patches.segment_ids[0, 0], [1, 2, -1, -1])
