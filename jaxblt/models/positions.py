"""Segment-aware positions: where a byte stands in its patch and in its document."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.layers import dense
from jaxblt.mixers.driver.counted import Counted
from jaxblt.mixers.driver.sequence import read
from jaxblt.parallel.halo import before, by_stretch, splits_sequence
from jaxblt.patching.patches import Patches
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """Periods of the sinusoidal position encoding, in bytes.

    Periods are whole numbers, and phases are computed modulo the period in integers. So position 10^9 is as exact as
    position 1, and a longer context has no phase that a shorter one lacks.

    Attributes:
      offset_periods: periods for the offset within the patch.
      periods: periods for the position within the document; 3 is a codon.
    """

    offset_periods: tuple[int, ...] = (2, 4, 8, 16, 32)
    periods: tuple[int, ...] = (2, 3, 4, 8, 16, 64, 256, 1024, 4096)

    @classmethod
    def genomic(cls) -> "PositionConfig":
        """Return the periods of genomes.

        Positions have those of a codon (3), a hexamer (6), motifs and turns of the helix (8, 10, 21), and a nucleosome
        (147).
        """
        return cls(periods=(3, 6, 8, 10, 21, 147))

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "offset_periods", "periods", least=1)


@dataclasses.dataclass(frozen=True)
class Places:
    """Integers per byte: `offset` in the patch, `previous` patch's length, `position` in the document, and, for
    bidirectional models alone, the bytes `left` until the patch's end."""

    offset: Int[Array, "B T"]
    previous: Int[Array, "B T"]
    position: Int[Array, "B T"]
    left: Int[Array, "B T"] | None = None


def document_positions(
    ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
) -> Int[Array, "B T"]:
    """Return each byte's offset in its document, for rows whose documents are contiguous.

    None is one document a row.
    """
    return read(ids[..., None], segment_ids, None, None).run(Counted(), ids)[0]


def last_index(segment_ids: Int[Array, "B T"]) -> Int[Array, "B"]:
    """Return the index of each row's last byte, before its trailing 0s; 0 for an empty row."""
    return jnp.maximum(jnp.sum(segment_ids != 0, 1, dtype=jnp.int32) - 1, 0)


def places(patches: Patches, positions: Int[Array, "B T"], *, causal: bool) -> Places:
    """Return each byte's place, from its patches.

    The length of a byte's own patch is known only once the patch has closed. So the causal form has the previous
    patch's instead. `left` is there if `causal` is False.
    """
    index = jnp.arange(patches.block_size, dtype=jnp.int32)[None, None]
    slot = jnp.minimum(patches.patch_ids, patches.capacity - 1)
    start = jnp.take_along_axis(patches.starts, slot, -1)
    previous = jnp.take_along_axis(by_stretch(_previous_lengths, patches), slot, -1)

    def flat(x: Int[Array, "B N S"]) -> Int[Array, "B T"]:
        return x.reshape(x.shape[0], -1)[:, : patches.num_bytes]

    offset, left = index - start, None
    if not causal:
        left = flat(start + jnp.take_along_axis(patches.lengths, slot, -1) - 1 - index)
    return Places(offset=flat(offset), previous=flat(previous), position=positions, left=left)


def _previous_lengths(patches: Patches) -> Int[Array, "B N P"]:
    """Return the length of the patch before each slot, 0 for the first of a document."""
    count = jnp.sum(patches.lengths > 0, -1, keepdims=True, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)
    tail = jnp.take_along_axis(patches.lengths, last, -1)
    tail_segment = jnp.take_along_axis(patches.segment_ids, last, -1)

    def delayed(own: Int[Array, "B N P"], last: Int[Array, "B N 1"]) -> Int[Array, "B N P"]:
        first = before(last, 1, axis=1) if splits_sequence(last) else jnp.zeros_like(last[:, :1])
        ahead = jnp.concatenate([first, last[:, :-1]], 1)
        return jnp.concatenate([ahead, own[..., :-1]], -1)

    lengths = delayed(patches.lengths, tail)
    segments = delayed(patches.segment_ids, tail_segment)
    return jnp.where(segments == patches.segment_ids, lengths, 0)


def features(config: PositionConfig, place: Places) -> Float[Array, "B T F"]:
    """Return sinusoids of offset and position, and log lengths, in fp32."""
    found = [waves(place.offset, config.offset_periods), waves(place.position, config.periods)]
    scalars = [place.offset, place.previous]
    if place.left is not None:
        found.append(waves(place.left, config.offset_periods))
        scalars.append(place.left)
    logs = jnp.log2(1.0 + jnp.maximum(jnp.stack(scalars, -1), 0).astype(jnp.float32)) / 8.0
    return jnp.concatenate([*found, logs], -1)


def waves(x: Int[Array, "B T"], periods: tuple[int, ...]) -> Float[Array, "B T F"]:
    """Return sine and cosine of 2 pi x / period, in fp32; phases are exact, as they are taken of whole numbers."""
    whole = jnp.asarray(np.array(periods, np.int32))[None, None]
    turns = jnp.mod(jnp.maximum(x, 0)[..., None], whole).astype(jnp.float32) / whole.astype(jnp.float32)
    angle = 2.0 * np.float32(np.pi) * turns
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


class SegmentAwarePosition(nn.Module):
    """A linear map of the place features to the width of the bytes."""

    config: PositionConfig
    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, place: Places) -> Float[Array, "B T D"]:
        x = features(self.config, place).astype(self.dtype)
        return dense(self.dim, axes=("features", "embed"), dtype=self.dtype, name="project")(x)


class PeriodicPosition(nn.Module):
    """A linear map of sinusoids of the position, for models without patches."""

    periods: tuple[int, ...]
    dim: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        x = waves(positions, self.periods).astype(self.dtype)
        return dense(self.dim, axes=("features", "embed"), dtype=self.dtype, name="project")(x)
