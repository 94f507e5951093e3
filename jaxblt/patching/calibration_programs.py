"""Programs that calibration runs on a sample: few, and known from its shape, so that they can compile side by side.

The threshold is an argument of each. What else calibration computes, it computes on the host, where nothing compiles.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import MOST_NATS
from jaxblt.patching.margin import budget_sums, margin_at
from jaxblt.patching.patches import Patches, from_closed, to_blocks
from jaxblt.patching.segment import closes_at, read_entropies


def open_rule(config: PatcherConfig) -> PatcherConfig:
    """Return the rule without what calibration finds, as the programs take it: so one serves any threshold."""
    return replace(config, threshold=None, margin=None)


def bracket(config: PatcherConfig) -> tuple[np.float32, np.float32]:
    """Return thresholds that every byte and no byte exceeds."""
    if config.mode == "greedy":
        return np.float32(0), np.float32(MOST_NATS * config.block_size)
    return np.float32(-MOST_NATS - 1), np.float32(MOST_NATS + 1)


@partial(jax.jit, static_argnums=0)
def mean_length(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the mean patch length in bytes at a threshold; slots are not limited."""
    ids = jnp.zeros(entropies.shape, jnp.int32)
    ends = to_blocks(closes_at(config, ids, entropies, segment_ids, threshold), config.block_size)
    valid = to_blocks(segment_ids, config.block_size) > 0
    begins = jnp.concatenate([jnp.ones_like(ends[..., :1]), ends[..., :-1]], -1) & valid
    count = jnp.sum(begins, dtype=jnp.int32)
    return jnp.sum(valid, dtype=jnp.int32).astype(jnp.float32) / count.astype(jnp.float32)


@partial(jax.jit, static_argnums=0)
def compared(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return what is compared with the threshold, and where it decides."""
    valid = segment_ids > 0
    if config.mode == "greedy":
        return budget_sums(config, entropies, segment_ids, threshold), valid
    inside = valid & (segment_ids == jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0))))
    before = jnp.pad(entropies[:, :-1], ((0, 0), (1, 0)))
    return entropies - before if config.monotonic else entropies, inside


@partial(jax.jit, static_argnums=0)
def gap(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return low and high: thresholds in [low, high) give the patches that this one gives."""
    found, valid = compared(config, entropies, segment_ids, threshold)
    low, high = bracket(config)
    over = found > threshold
    return jnp.max(jnp.where(valid & ~over, found, low)), jnp.min(jnp.where(valid & over, found, high))


@partial(jax.jit, static_argnums=0)
def least_margin(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Float[Array, ""]:
    """Return the least `boundary_margin` of the sample."""
    return jnp.min(margin_at(config, entropies, segment_ids, threshold))


def patches_per_block(patches: Patches) -> Int[Array, "B N"]:
    """Count the patches in each block, as `calibrate_capacity` takes them.

    Refused boundaries count as patches.
    """
    return jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32) + patches.overflow


@partial(jax.jit, static_argnums=0)
def count_patches(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Int[Array, "B N"]:
    """Return `patches_per_block` of the patches that bytes make at a threshold."""
    closed = closes_at(config, ids, entropies, segment_ids, threshold)
    cut = from_closed(closed, segment_ids, block_size=config.block_size, capacity=config.slots)
    return patches_per_block(cut)


def block_counts(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"] | None,
) -> Int[Array, "B N"]:
    """Return `patches_per_block` of the patches that a rule makes of a sample."""
    threshold = np.float32(config.known_threshold() if config.has_threshold else 0)
    read = read_entropies(config, ids, entropies)
    return count_patches(open_rule(config), ids, read, segment_ids, threshold)


def lower_calibration(
    config: PatcherConfig, rows: int, length: int, place: jax.sharding.Sharding
) -> list[jax.stages.Lowered]:
    """Lower all that calibration of an open threshold and capacity runs on a sample of this shape in this place.

    Calls for such a sample take what these compile to. Compile all of them, in threads, before the first call, or JAX
    compiles again what is not there yet.
    """
    config = open_rule(config)
    shaped = partial(jax.ShapeDtypeStruct, (rows, length), sharding=place)
    ids, entropies, threshold = shaped(jnp.int32), shaped(jnp.float32), np.float32(0)
    programs: list[Any] = [mean_length, gap, least_margin]
    if config.mode != "greedy":
        programs.append(compared)
    lowered = [program.lower(config, entropies, ids, threshold) for program in programs]
    if config.capacity is None:
        lowered.append(count_patches.lower(config, ids, entropies, ids, threshold))
    return lowered
