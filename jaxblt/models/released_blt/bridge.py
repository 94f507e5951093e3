"""How bytes become patches in the released models, and how bytes read them: k vectors a patch."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import Linear, RMSNorm, dense, linears
from jaxblt.mixers import AttentionConfig
from jaxblt.models.stack import StackConfig
from jaxblt.parallel.islands import over_batch
from pallas_kernels.patch_attention import pool

Keys = tuple[Float[Array, "*S J"], Float[Array, "*S J"]]
"""Keys and values, the heads side by side."""


class Read(nn.Module):
    """x + W_o attention(queries of norm x, keys and values of norm y), added to x: x counts twice.

    Heads and the norms' epsilon are those of a stack of attention.
    """

    stack: StackConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        mixer = self.heads
        norm, into = {"dtype": self.dtype, "epsilon": self.stack.norm_epsilon}, "...d,dhk->...hk"
        self.query_norm, self.key_norm = RMSNorm(**norm), RMSNorm(**norm)
        sizes = {"q": mixer.num_heads, "k": mixer.groups, "v": mixer.groups}
        self.q, self.k, self.v = (
            Linear(into, {"h": count, "k": mixer.width}, ("embed", axis, "head_dim"), self.dtype)
            for axis, count in zip(("heads", "kv_heads", "kv_heads"), sizes.values(), strict=True)
        )
        names = ("heads", "head_dim", "embed")
        self.out = Linear("...hk,hkd->...d", {"d": self.stack.dim}, names, self.dtype)

    @property
    def heads(self) -> AttentionConfig:
        """The attention whose heads these are."""
        mixer: Any = self.stack.mixer(self.stack.pattern[0])
        return mixer

    def keys(self, y: Float[Array, "*S C"]) -> Keys:
        """Return keys and values of what is read."""
        k, v = linears(self.key_norm(y), [self.k, self.v])
        return k.reshape(*k.shape[:-2], -1), v.reshape(*v.shape[:-2], -1)

    def queries(self, x: Float[Array, "*S C"]) -> Float[Array, "*S H K"]:
        """Return queries of what reads."""
        return self.q(self.query_norm(x))

    def split(self, keys: Keys) -> tuple[Float[Array, "*S G K"], Float[Array, "*S G K"]]:
        """Return keys and values by head."""
        k, v = (x.reshape(*x.shape[:-1], self.heads.groups, -1) for x in keys)
        return k, v

    def add(self, x: Float[Array, "*S C"], found: Float[Array, "*S H K"]) -> Float[Array, "*S C"]:
        """Return x with what it read."""
        return x + (self.out(found).astype(x.dtype) + x)


class BytesToVectors(nn.Module):
    """Each patch's k vectors: W_p of the maximum over its bytes, cut in k, which read the bytes.

    The vectors lie side by side. Reads of earlier blocks, if any, are made for their parameters, and dropped.
    """

    stack: StackConfig
    vectors: int
    spare: int
    dtype: Any = jnp.float32

    def setup(self) -> None:
        width = self.vectors * self.stack.dim
        self.project = dense(width, axes=("embed", "latent"), dtype=self.dtype, name="project")
        self.reads = [Read(self.stack, self.dtype, name=f"read_{i}") for i in range(self.spare + 1)]

    def keys(self, h: Float[Array, "*S C"]) -> Keys:
        """Return keys and values of bytes."""
        for read in self.reads[:-1]:
            # Touch the parameters, so that the model has them: XLA drops results that nothing reads
            read.keys(h)
            read.add(h, read.queries(h))
        return self.reads[-1].keys(h)

    def __call__(
        self,
        peaks: Float[Array, "B N P C"],
        keys: Keys,
        patch_ids: Int[Array, "B N S"],
        real: Bool[Array, "B N P"],
    ) -> Float[Array, "B N P E"]:
        """Return vectors of patches.

        Args:
          peaks: the maximum over each patch's bytes.
          keys: of the bytes, block by block.
          patch_ids: the slot of each byte; P for bytes of no patch.
          real: False for slots without a patch, whose vectors are zero.
        """
        read, count = self.reads[-1], self.vectors
        x = self.project(peaks).reshape(*peaks.shape[:-1], count, -1)
        q = read.queries(x)
        q = q.reshape(*q.shape[:-3], -1, q.shape[-1])
        shares = read.heads.num_heads // read.heads.groups
        k, v = (jnp.tile(jnp.repeat(x, shares, -2), (count, 1)) for x in read.split(keys))
        arrays = ((q, k.astype(q.dtype), v.astype(q.dtype)), (patch_ids,))
        found = over_batch(lambda own, _: pool(*own[0], *own[1]), arrays, heads=(True, False))
        x = read.add(x, found.reshape(*x.shape[:-1], -1, found.shape[-1]))
        return x.reshape(*peaks.shape[:-1], -1) * real[..., None].astype(x.dtype)


def find_peaks(
    h: Float[Array, "B N S C"], patch_ids: Int[Array, "B N S"], slots: int
) -> Float[Array, "B N P C"]:
    """Return the maximum over the bytes of each slot; zero for slots without a byte."""
    one = lambda h, ids: jax.ops.segment_max(h, ids, slots, indices_are_sorted=True)  # noqa: E731
    peaks = jax.vmap(jax.vmap(one))(h, patch_ids)
    return jnp.where(jnp.isneginf(peaks), jnp.zeros((), h.dtype), peaks)


class ReadPatch(nn.Module):
    """Each byte reads the k vectors of one patch."""

    stack: StackConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, h: Float[Array, "B T C"], vectors: Float[Array, "B M V C"], latest: Int[Array, "B T"]
    ) -> Float[Array, "B T C"]:
        """Return bytes with what they read, given the index of each one's patch."""
        read = Read(self.stack, self.dtype, name="read")
        pick = jax.vmap(lambda x, at: x[at])
        k, v = (pick(x, latest) for x in read.split(read.keys(vectors)))
        q = read.queries(h)
        grouped = q.reshape(*q.shape[:2], k.shape[-2], -1, q.shape[-1])
        scores = jnp.einsum("btghk,btvgk->btghv", grouped, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * q.shape[-1] ** -0.5, -1).astype(v.dtype)
        return read.add(h, jnp.einsum("btghv,btvgk->btghk", weights, v).reshape(q.shape))
