"""The patches that a byte reads: which distances from its latest one, and the patches before and behind a block."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.models.bridge import take_ranks
from jaxblt.parallel.halo import splits_sequence
from jaxblt.patching.patches import Patches
from pallas_kernels.attention.rules import Dilated, Interval, Rule, Strided

Pattern = Literal["latest", "dilated", "local_global"]
"""Which of the patches in reach a byte reads; `BLTConfig` says what each is."""
NEAR, EVERY = 64, 64
"""Patches that `local_global` reads next to each other, and the stride of those farther away."""


def read_distances(pattern: Pattern, look_back: int, *, causal: bool) -> tuple[int, ...] | None:
    """Return the distances back from a byte's latest patch that it reads, nearest first; negative ones lie ahead.

    None is all of 0 .. look_back - 1.
    """
    if pattern == "latest":
        return None
    reach = look_back - 1
    rule: Rule = Dilated(reach) if pattern == "dilated" else Interval(NEAR - 1, NEAR - 1) | Strided(EVERY)
    away = np.arange(0 if causal else -reach, look_back)
    seen = away[np.asarray(rule.sees(away, np.zeros_like(away)))]
    return tuple(int(d) for d in sorted(seen, key=lambda d: (abs(d), d < 0)))


def patches_around(
    z: Float[Array, "B N P D"], patches: Patches, *, reach: int
) -> tuple[Float[Array, "B N K D"], Int[Array, "B N S"], Bool[Array, "B N K"]]:
    """Return `keys`, `latest` and `valid` of `PatchesToBytes` for bytes that read patches ahead as well.

    Keys are `reach` patches before the block's first, the block's own, and those behind it, without holes between
    them. A byte's latest patch is its own.

    Raises:
      ValueError: devices split the sequence.
    """
    if splits_sequence(z):
        raise ValueError(
            "patterns of bidirectional bridges read patches ahead, which a split sequence does not hand over: use "
            "bridge_pattern='latest', or a mesh with seq=1"
        )
    batch, blocks, slots, dim = z.shape
    count = jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32)
    first = jnp.cumsum(count, -1, dtype=jnp.int32) - count
    width = reach + slots + reach
    nothing = jnp.zeros((batch, width, dim), z.dtype), jnp.zeros((batch, width), jnp.int32)
    keys, documents = take_ranks(z, patches, nothing, first + slots + reach, width)
    rank = first[..., None] + jnp.arange(-reach, slots + reach, dtype=jnp.int32)[None, None]
    there = (rank >= 0) & (rank < jnp.sum(count, -1)[:, None, None])
    documents = documents.reshape(batch, blocks, width)
    valid = there & (documents > 0) & (documents == jnp.abs(patches.segment_ids[..., :1]))
    latest = jnp.where(patches.patch_ids == patches.capacity, -1, patches.patch_ids + reach)
    return keys.reshape(batch, blocks, width, dim), latest, valid


def count_tiles(
    latest: Int[np.ndarray, "N S"],
    valid: Bool[np.ndarray, "N K"],
    distances: tuple[int, ...],
    *,
    tile: int = 64,
) -> tuple[int, int]:
    """Count the squares of bytes by patches that a bridge reads, and those that a dense one would read.

    The difference is what a pattern skips. A dense bridge reads all patches of the document up to a byte's latest one,
    and as far ahead as the pattern reads.

    Args:
      latest: the index of each byte's latest patch among the K keys of its block; negative for none.
      valid: False for keys of another document and for holes.
      distances: of `read_distances`.
      tile: bytes and patches of a square.
    """
    away = latest[..., None] - np.arange(valid.shape[-1])[None, None]
    there = valid[:, None] & (latest[..., None] >= 0)
    counts = [_tiles(there & seen, tile) for seen in (np.isin(away, distances), away >= min(0, *distances))]
    return counts[0], counts[1]


def _tiles(seen: Bool[np.ndarray, "N S K"], tile: int) -> int:
    """Count the squares that hold a pair."""
    pads = [(0, -size % tile) for size in seen.shape[1:]]
    seen = np.pad(seen, ((0, 0), *pads))
    return int(seen.reshape(len(seen), seen.shape[1] // tile, tile, -1, tile).any((2, 4)).sum())
