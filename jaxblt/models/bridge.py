"""The bridge between bytes and patches: cross-attention up to a patch, and back down to its bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.layers import RMSNorm, apart, dense, named, normed_linears
from jaxblt.parallel.carry import exclusive_scan
from jaxblt.parallel.halo import by_stretch, splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence, seq_axis
from jaxblt.patching.patches import Patches, into_blocks
from pallas_kernels.patch_attention import lookup, pool
from pallas_kernels.runtime import OwnGradient, count_below, has_reference_ops, vary_alike


def to_blocks(x: Float[Array, "B T D"], patches: Patches) -> Float[Array, "B N S D"]:
    """Reshape bytes to whole blocks, the last one padded with zeros."""
    return into_blocks(x, patches.block_size)


def to_row(x: Shaped[Array, "B N S *C"], h: Float[Array, "B T D"]) -> Shaped[Array, "B T *C"]:
    """Put blocks one behind the other, without the bytes that filled up the last one."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : h.shape[1]]


def over_blocks(fn: Callable[[Any, Any], Array], heads: Any, blocked: Any, shared: Any = ()) -> Array:
    """Call `fn((heads, blocked), shared)` on each device's own rows, heads and blocks.

    Rows are split in blocks under a `seq` axis only. A single block, which a step of decoding has, is whole on all
    devices of the sequence.
    """
    arrays, by_head = (heads, blocked), (True, False)
    if seq_axis(arrays) is None or jax.tree.leaves(arrays)[0].shape[1] == 1:
        return over_batch(fn, arrays, shared, heads=by_head)
    return over_sequence(lambda own, _, shared: fn(own, shared), arrays, (), shared, heads=by_head)


def split_heads(x: Float[Array, "... D"], heads: int) -> Float[Array, "... H K"]:
    """Split the last axis into heads."""
    return x.reshape(*x.shape[:-1], heads, -1)


class BytesToPatches(nn.Module):
    """p_j = W [h_e + W_o attention(q = h_e, keys = bytes of j)], e the last byte of patch j.

    A causal encoder has the whole patch behind its last byte, which makes that byte's vector the natural query; it is
    the one that a decoder holds when the patch closes. Holes are zero (BLT, 2412.09871, sec. 3.2.2).

    Attributes:
      dim: width of the patches.
      width: width of the bytes.
      heads: attention heads, over the width of the bytes.
    """

    dim: int
    width: int
    heads: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        width, dtype = self.width, self.dtype
        self.norm = RMSNorm(dtype=dtype, name="norm")
        self.query = dense(width, axes=("embed", "heads"), dtype=dtype, name="query")
        self.key = dense(width, axes=("embed", "heads"), dtype=dtype, name="key")
        self.value = dense(width, axes=("embed", "heads"), dtype=dtype, name="value")
        self.out = dense(width, axes=("heads", "embed"), dtype=dtype, name="out")
        self.up = dense(self.dim, axes=("embed", "latent"), dtype=dtype, name="up")

    def keys(self, h: Float[Array, "*S C"]) -> tuple[Float[Array, "*S C"], Float[Array, "*S C"]]:
        """Return keys and values of bytes."""
        k, v = normed_linears(h, [self.key, self.value], self.norm)
        return k, v

    def read_bytes(
        self,
        last: Float[Array, "B N P C"],
        h: Float[Array, "B N S C"],
        patch_ids: Int[Array, "B N S"],
        real: Bool[Array, "B N P"],
    ) -> Float[Array, "B N P D"]:
        """Return patch vectors of bytes; see `read`."""
        return self.read(last, self.keys(h), patch_ids, real)

    def read(
        self,
        last: Float[Array, "B N P C"],
        keys: tuple[Float[Array, "B N S C"], Float[Array, "B N S C"]],
        patch_ids: Int[Array, "B N S"],
        real: Bool[Array, "B N P"],
    ) -> Float[Array, "B N P D"]:
        """Return patch vectors.

        Args:
          last: the vector of each patch's last byte.
          keys: of the bytes, block by block.
          patch_ids: the slot of each byte; P for bytes of no patch.
          real: False for holes, whose vector is zero.
        """
        (query,) = normed_linears(last, [self.query], self.norm)
        q, k, v = (split_heads(x, self.heads) for x in (query, *keys))
        pooled = over_blocks(lambda args, _: pool(*args[0], *args[1]), (q, k, v), (patch_ids,))
        found = self.out(pooled.reshape(*pooled.shape[:-2], -1))
        patches = self.up(last + found.astype(last.dtype))
        return patches * real[..., None].astype(patches.dtype)


def last_bytes(h: Float[Array, "B N S C"], patches: Patches) -> Float[Array, "B N P C"]:
    """Return the vector of each patch's last byte; zero for holes."""
    # Give holes an index each: with unique ones the gradient is stores, where it would be atomic sums
    beyond = patches.block_size + jnp.arange(patches.capacity, dtype=jnp.int32)
    end = jnp.where(patches.lengths > 0, patches.starts + patches.lengths - 1, beyond)
    take = lambda x, at: x.at[at].get(mode="fill", fill_value=0, unique_indices=True)  # noqa: E731
    return jax.vmap(jax.vmap(take))(h, end)


class PatchesToBytes(nn.Module):
    """Byte t attends to the W latest patches that ended at or before t, told apart by a learned bias of the distance.

    A byte before which no patch has ended gets 0.

    Attributes:
      look_back: W, at least 2 so that the softmax has something to choose from.
      heads: attention heads, over the width of the bytes.
      distances: of the patches that are read instead, from the latest one; negative ones lie ahead.
    """

    look_back: int
    heads: int
    dtype: Any = jnp.float32
    distances: tuple[int, ...] | None = None

    @nn.compact
    def __call__(
        self,
        h: Float[Array, "B N S C"],
        keys: Float[Array, "B N K D"],
        latest: Int[Array, "B N S"],
        valid: Bool[Array, "B N K"],
    ) -> Float[Array, "B N S C"]:
        """Return what each byte reads from the patches.

        Args:
          h: bytes, block by block.
          keys: patch vectors that a block's bytes may see, oldest first.
          latest: the index in `keys` of the latest patch that ended at or before each byte; negative for none.
          valid: False for keys of another document and for holes.
        """
        width = h.shape[-1]
        query = dense(width, axes=("embed", "heads"), dtype=self.dtype, name="query")
        (q,) = normed_linears(h, [query], RMSNorm(dtype=self.dtype, name="norm"))
        keys = RMSNorm(dtype=self.dtype, name="key_norm")(keys)
        k = dense(width, axes=("latent", "heads"), dtype=self.dtype, name="key")(keys)
        v = dense(width, axes=("latent", "heads"), dtype=self.dtype, name="value")(keys)
        count = self.look_back if self.distances is None else len(self.distances)
        bias = self.param("bias", named(nn.initializers.zeros, None, None), (self.heads, count), jnp.float32)
        q, k, v = (split_heads(x, self.heads) for x in (q, k, v))

        def read(batched: Any, bias: Any) -> Float[Array, "B N S H K"]:
            (q, k, v), (latest, valid) = batched
            return lookup(q, k, v, latest, valid, bias, look_back=count, distances=self.distances)

        found = over_blocks(read, (q, k, v), (latest, valid), bias)
        out = dense(width, axes=("heads", "embed"), dtype=self.dtype, name="out")
        return apart(out(found.reshape(*h.shape)))


Tail = tuple[Float[Array, "B W D"], Int[Array, "B W"]]
"""The W latest patches and their documents, oldest first; document 0 where there were fewer."""


def visible_patches(
    z: Float[Array, "B N P D"], patches: Patches, *, look_back: int, causal: bool, earlier: Tail | None = None
) -> tuple[Float[Array, "B N K D"], Int[Array, "B N S"], Bool[Array, "B N K"]]:
    """Return `keys`, `latest` and `valid` of `PatchesToBytes`.

    The K keys are W patches before the block, then its own. Rows are whole, or go on where the `earlier` patches ended.
    With `causal=False` a byte's latest patch is its own, closed or not.
    """
    if earlier is None:
        tail, same = by_stretch(partial(_patches_before, look_back=look_back), (z, patches))
    else:
        tail, same = _tails(z, patches, earlier, look_back)
    keys = jnp.concatenate([tail, z], 2)
    valid = jnp.concatenate([same, patches.lengths > 0], 2)
    own = patches.patch_ids if not causal else patches.patch_ids - (~patches.closed).astype(jnp.int32)
    padding = patches.patch_ids == patches.capacity
    return keys, jnp.where(padding, -1, own + look_back), valid


def _patches_before(own: Any, *, look_back: int) -> tuple[Float[Array, "B N W D"], Bool[Array, "B N W"]]:
    """Return `_tails` of rows that begin here, or in the stretch of another device."""
    z, patches = own
    batch, _, _, dim = z.shape
    nothing = jnp.zeros((batch, look_back, dim), z.dtype), jnp.zeros((batch, look_back), jnp.int32)
    earlier = nothing
    if splits_sequence(z):
        counts = jnp.sum(patches.lengths > 0, (1, 2), dtype=jnp.int32)
        earlier = exclusive_scan(_later, nothing, take_ranks(z, patches, nothing, counts[:, None], look_back))
    return _tails(z, patches, earlier, look_back)


def _tails(
    z: Float[Array, "B N P D"], patches: Patches, earlier: Tail, look_back: int
) -> tuple[Float[Array, "B N W D"], Bool[Array, "B N W"]]:
    """Return the W patches before each block, oldest first, and which share its document."""
    batch, blocks, _, dim = z.shape
    counts = jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32)
    firsts = jnp.cumsum(counts, -1, dtype=jnp.int32) - counts
    tail, documents = take_ranks(z, patches, earlier, firsts, look_back)
    documents = documents.reshape(batch, blocks, look_back)
    same = (documents > 0) & (documents == jnp.abs(patches.segment_ids[..., :1]))
    return tail.reshape(batch, blocks, look_back, dim), same


def take_ranks(
    z: Float[Array, "B N P D"], patches: Patches, earlier: Tail, ends: Int[Array, "B M"], look_back: int
) -> tuple[Float[Array, "B M*W D"], Int[Array, "B M*W"]]:
    """Take, for each of M ends, the W patches whose ranks in the row come before it.

    Negative ranks are in `earlier`.
    """
    ranks = (ends[..., None] + jnp.arange(-look_back, 0, dtype=jnp.int32)[None, None]).reshape(
        ends.shape[0], -1
    )
    counts = jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32)
    edges = jnp.cumsum(counts, -1, dtype=jnp.int32)
    find = jax.vmap(lambda edges, wanted: count_below(edges, wanted + 1))
    block = jnp.minimum(find(edges, ranks), edges.shape[1] - 1).astype(jnp.int32)
    slot = jnp.clip(ranks - jnp.take_along_axis(edges - counts, block, 1), 0, patches.capacity - 1)
    here, there = block * patches.capacity + slot, jnp.clip(ranks + look_back, 0, look_back - 1)

    def pick(own: Array, before: Array) -> Array:
        axes = (...,) + (None,) * (own.ndim - 2)
        found = [_take(x, i) for x, i in ((own, here), (before, there))]
        return jnp.where((ranks >= 0)[axes], *found)

    rows = z.shape[0]
    return pick(z.reshape(rows, -1, z.shape[-1]), earlier[0]), pick(
        patches.segment_ids.reshape(rows, -1), earlier[1]
    )


def _take(x: Shaped[Array, "B T ..."], index: Int[Array, "B M"]) -> Shaped[Array, "B M ..."]:
    """Take M entries of each row."""
    if has_reference_ops() or not jnp.issubdtype(x.dtype, jnp.inexact):
        return _entries(x, index)
    return _taken(*vary_alike(x, index))


def _entries(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), 1)


def _add_entries(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    """Add the gradient to zeros that XLA does not know: a stack's masks would read the same array of them."""
    index, empty = saved
    zero = jax.lax.optimization_barrier(jnp.zeros((), gradient.dtype))
    zeros = jnp.broadcast_to(zero, (len(index), *empty.shape[1:]))
    summed = zeros.at[jnp.arange(len(index))[:, None], index].add(gradient)
    return summed, np.zeros(index.shape, jax.dtypes.float0)


_taken = OwnGradient(_entries)
_taken.defvjp(lambda x, index: (_entries(x, index), (index, x[:0])), _add_entries)


def _later(earlier: Tail, own: Tail) -> Tail:
    """Return the W latest patches of both."""
    width = own[1].shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None]
    new = jnp.sum(own[1] != 0, 1, keepdims=True, dtype=jnp.int32)
    index = jnp.where(index >= width - new, width + index, index + new)

    def latest(earlier: Array, own: Array) -> Array:
        joined = jnp.concatenate([earlier, own], 1)
        return jnp.take_along_axis(joined, index.reshape(index.shape + (1,) * (own.ndim - 2)), 1)

    return latest(earlier[0], own[0]), latest(earlier[1], own[1])
