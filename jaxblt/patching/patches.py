"""Patches: how the bytes of a row are grouped, with static shapes.

Bytes are cut into blocks of a fixed number of bytes. Each block holds up to P patches of its own, and a patch never
crosses a block's edge. That keeps every shape static, and lets blocks (not bytes) be what is sharded.
"""

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.array_checks import check_rows, on_host
from jaxblt.show import show
from pallas_kernels.runtime import count_below


@flax.struct.dataclass
class Patches:
    """Patches of B rows, each N blocks of `block_size` bytes with P slots.

    Slots beyond a block's last patch are holes. The slots of a row, read block after block, are the latent
    sequence (Byte Latent Transformer, 2412.09871, sec. 2).

    Attributes:
      patch_ids: the slot, in its own block, of the patch that holds each byte; P for padding bytes.
      closed: whether the patch of byte t ends at t, decided from only bytes ≤ t. The last patch of a
        document that is still open stays invisible to its own bytes.
      starts: offset of the patch's first byte in its block; `block_size` for holes.
      lengths: bytes in the patch; 0 for holes. They sum to the number of bytes that are not padding.
      segment_ids: the patch's document s > 0. A hole inside document s, a slot that counts as time and holds nothing,
        has -s. A slot of a block of padding has 0.
      overflow: boundaries refused in each block because its slots were used up.
      num_bytes: bytes in a row (N * block_size, less the tail that was padded).
    """

    patch_ids: Int[Array, "B N S"]
    closed: Bool[Array, "B N S"]
    starts: Int[Array, "B N P"]
    lengths: Int[Array, "B N P"]
    segment_ids: Int[Array, "B N P"]
    overflow: Int[Array, "B N"]
    num_bytes: int = flax.struct.field(pytree_node=False)

    __repr__ = show

    @property
    def block_size(self) -> int:
        return self.patch_ids.shape[-1]

    @property
    def capacity(self) -> int:
        return self.starts.shape[-1]


def from_closed(
    closed: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    block_size: int,
    capacity: int,
    last: Bool[Array, "B T"] | None = None,
) -> Patches:
    """Group bytes into patches, given after which bytes a patch closes.

    A patch also starts at each block's edge and where the document changes. Boundaries are accepted left to
    right while the block has slots; afterwards bytes join the open patch and the refusal is counted in
    `overflow`. Documents are to start at a block's edge and padding to fill a block's tail, as the packer's
    alignment ensures.

    Args:
      closed: True where a patch is to end, decided from bytes ≤ t.
      segment_ids: documents, 0 for padding.
      block_size: bytes in a block (S).
      capacity: slots in a block (P).
      last: True where nothing of the block follows, so that a patch may end there in whatever slot; None for the
        block's last index alone.

    Raises:
      ValueError: a block cannot hold one patch, or more slots than bytes were asked for.
    """
    if not 1 <= capacity <= block_size:
        raise ValueError(f"capacity must lie in 1..block_size = {block_size}, got {capacity}")
    num_bytes = closed.shape[1]
    closed = to_blocks(closed, block_size)
    segments = to_blocks(segment_ids, block_size)
    valid = segments > 0
    wanted, starts = _wanted(closed, segments)
    rank = jnp.cumsum(starts, -1, dtype=jnp.int32)
    patch_ids = jnp.where(valid, jnp.minimum(rank, capacity) - 1, capacity)
    next_ok = jnp.concatenate([(rank[..., :-1] < capacity), jnp.ones_like(valid[..., :1])], -1)
    if last is not None:
        next_ok |= to_blocks(last, block_size)
    overflow = jnp.sum(wanted & ~next_ok, -1, dtype=jnp.int32)
    return Patches(
        patch_ids=patch_ids,
        closed=wanted & next_ok,
        overflow=overflow,
        num_bytes=num_bytes,
        **_slots(patch_ids, segments, capacity),
    )


def count_wanted(
    closed: Bool[Array, "B T"], segment_ids: Int[Array, "B T"], *, block_size: int
) -> Int[Array, "B N"]:
    """Count the patches of each block that `from_closed` would make with slots for all of them."""
    _, starts = _wanted(to_blocks(closed, block_size), to_blocks(segment_ids, block_size))
    return jnp.sum(starts, -1, dtype=jnp.int32)


def _wanted(
    closed: Bool[Array, "B N S"], segments: Int[Array, "B N S"]
) -> tuple[Bool[Array, "B N S"], Bool[Array, "B N S"]]:
    """Return where patches are to end, and where they start."""
    valid, size = segments > 0, segments.shape[-1]
    wanted = jnp.where(jnp.arange(size) == size - 1, True, closed) & valid
    before = jnp.concatenate([jnp.ones_like(valid[..., :1]), wanted[..., :-1]], -1)
    changed = jnp.concatenate([jnp.ones_like(valid[..., :1]), segments[..., 1:] != segments[..., :-1]], -1)
    return wanted, (before | changed) & valid


def check_patches(patches: Patches, ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None) -> None:
    """Raise ValueError unless patches have the bytes and rows of ids.

    Outside of jit, they must have the documents too. Without segment ids a row is one document, and has no padding.
    """
    check_rows("ids", ids)
    given = (patches.patch_ids.shape[0], patches.num_bytes)
    if given != ids.shape:
        raise ValueError(
            f"patches of {given[0]} rows of {given[1]} bytes do not fit ids of {ids.shape[0]} rows of {ids.shape[1]}: "
            "cut them of the same rows"
        )
    documents, slots = on_host(patches.segment_ids), on_host(patches.patch_ids)
    if documents is None or slots is None:
        return
    wanted = np.maximum(documents[:, :1, 0], 1) if segment_ids is None else on_host(segment_ids)
    if wanted is None:
        return
    padded = np.pad(documents, ((0, 0), (0, 0), (0, 1)))
    held = np.take_along_axis(padded, slots, -1).reshape(given[0], -1)[:, : given[1]]
    if (held != wanted).any():
        row, place = (int(i) for i in np.argwhere(held != wanted)[0])
        raise ValueError(
            f"patches have byte {place} of row {row} in document {held[row, place]}, and segment_ids in "
            f"{np.broadcast_to(wanted, held.shape)[row, place]} (0 is padding; None is one document a row): cut them "
            "with the same segment_ids"
        )


def _slots(patch_ids: Int[Array, "B N S"], segments: Int[Array, "B N S"], capacity: int) -> dict[str, Array]:
    """Return start, length and document of each slot.

    Ids rise within a block, so bisection finds a slot's first byte.
    """
    block_size = segments.shape[-1]
    slots = jnp.arange(capacity + 1, dtype=jnp.int32)
    edges = jnp.vectorize(lambda ids: count_below(ids, slots), signature="(s)->(p)")(patch_ids)
    starts, lengths = edges[..., :-1], edges[..., 1:] - edges[..., :-1]
    real = lengths > 0
    first = jnp.take_along_axis(segments, jnp.minimum(starts, block_size - 1), -1)
    return {
        "starts": jnp.where(real, starts, block_size),
        "lengths": lengths,
        "segment_ids": jnp.where(real, first, -segments[..., :1]),
    }


def to_blocks(x: Shaped[Array, "B T"], block_size: int) -> Shaped[Array, "B N S"]:
    """Cut rows into blocks, the last one filled up with zeros (False)."""
    return into_blocks(x, block_size)


def into_blocks(x: Shaped[Array, "B T ..."], block_size: int) -> Shaped[Array, "B N S ..."]:
    """Cut rows into blocks, the last one filled up with zeros."""
    count = -(-x.shape[1] // block_size)
    x = jnp.pad(x, ((0, 0), (0, count * block_size - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], count, block_size, *x.shape[2:])


def bytes_per_patch(patches: Patches) -> Float[Array, ""]:
    """Return the mean length of the patches, in bytes."""
    count = jnp.sum(patches.lengths > 0, dtype=jnp.int32)
    return jnp.sum(patches.lengths, dtype=jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
