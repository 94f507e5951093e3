"""Rows for the tests of patching: bytes, entropies on a coarse grid (so that ties happen) and packed
documents."""

import numpy as np


def random_rows(
    seed: int, rows: int, blocks: int, block_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, entropies and segment ids; documents start at blocks' edges and end anywhere, rows may end in
    padding."""
    rng = np.random.default_rng(seed)
    shape = (rows, blocks * block_size)
    text = np.frombuffer(b"a cat, 42 caf\xc3\xa9s\n\tZ_z{}@[`", np.uint8).astype(np.int32) + 4
    ids = rng.choice(text, shape)
    entropies = rng.integers(0, 44, shape).astype(np.float32) / np.float32(8)
    segments = np.zeros(shape, np.int32)
    for row in range(rows):
        document, block = 0, 0
        while block < blocks:
            span = int(rng.integers(1, blocks - block + 1))
            document += 1
            end = (block + span) * block_size - int(rng.integers(0, block_size))
            segments[row, block * block_size : end] = document
            ids[row, block * block_size] = 1
            block += span
    segments[-1, (blocks - 1) * block_size :] = 0
    return np.where(segments > 0, ids, 3).astype(np.int32), entropies, segments
