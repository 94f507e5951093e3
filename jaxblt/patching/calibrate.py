"""Thresholds and capacities found from a sample, since what an entropy model and a text ask for varies."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import MOST_NATS
from jaxblt.patching.patches import Patches, to_blocks
from jaxblt.patching.segment import closes_at
from jaxblt.validation import number, whole

RESOLUTION = 2e-7  # relative, above 1 nat: neighbouring fp32 numbers


def calibrate_threshold(
    entropies: np.ndarray | Array,
    target_bytes_per_patch: float,
    *,
    config: PatcherConfig,
    segment_ids: np.ndarray | Array | None = None,
) -> float:
    """The threshold, in nats, at which the sample's patches have a mean length nearest to the target.

    Bisection: the number of patches never grows with the threshold, in these modes and under any limits.
    Slots are not limited here.

    Args:
      entropies: [rows, bytes] or [bytes], nats, of the prediction made at each byte.
      target_bytes_per_patch: mean length.
      config: of mode entropy or greedy; its threshold is not read.
      segment_ids: documents, 0 for padding; None is one document a row.

    Raises:
      ValueError: the mode has no threshold to search for; or the target is out of reach, with the range that
        is not.
    """
    if config.mode not in ("entropy", "greedy"):
        raise ValueError(f"calibrate_threshold is for mode='entropy' or 'greedy', got {config.mode!r}")
    number("target_bytes_per_patch", target_bytes_per_patch, above=0)
    sample = jnp.atleast_2d(jnp.asarray(entropies, jnp.float32))
    segments = jnp.ones(sample.shape, jnp.int32) if segment_ids is None else jnp.atleast_2d(segment_ids)
    if segments.shape != sample.shape or not bool(jnp.any(segments > 0)):
        raise ValueError(
            f"the sample holds no bytes, or segment_ids differ in shape: {sample.shape}, {segments.shape}"
        )
    if not bool(jnp.all(jnp.isfinite(sample))):
        raise ValueError("entropies must be finite: the entropy model gave NaN or infinity")

    @jax.jit
    def achieved(threshold: Float[Array, ""]) -> Float[Array, ""]:
        return _mean_length(config, sample, segments, threshold)

    low, high = _bracket(config)
    least, most = float(achieved(low)), float(achieved(high))
    if not least <= target_bytes_per_patch <= most:
        raise ValueError(
            f"{target_bytes_per_patch} bytes per patch is out of reach: here mode={config.mode!r} with "
            f"min_length={config.min_length}, max_length={config.max_length}, block_size={config.block_size} "
            f"gives {least:.4g} to {most:.4g}"
        )
    while high - low > RESOLUTION * max(1.0, abs(low), abs(high)):
        middle = np.float32((low + high) / 2)
        length = float(achieved(middle))
        if length < target_bytes_per_patch:
            low, least = middle, length
        else:
            high, most = middle, length
    return float(low if target_bytes_per_patch - least < most - target_bytes_per_patch else high)


def calibrate_capacity(
    patches_per_block: np.ndarray | Array, *, block_size: int, quantile: float = 0.999, multiple: int = 8
) -> int:
    """Slots that suffice for a share `quantile` of blocks, rounded up to a multiple and at most block_size.

    Args:
      patches_per_block: counts in a sample, of any shape (see `patches_per_block`); blocks of padding (0) are
        left out.
      block_size: bytes in a block.
      quantile: share of blocks that are not to overflow.
      multiple: of which the capacity is one, for the kernels' sake.

    Raises:
      ValueError: the sample is empty, or the quantile lies outside 0..1.
    """
    counts = np.asarray(patches_per_block).reshape(-1)
    counts = counts[counts > 0]
    if counts.size == 0:
        raise ValueError("no block of the sample holds a patch: pass the counts of at least one full block")
    number("quantile", quantile, least=0, most=1)
    whole("multiple", multiple, least=1)
    whole("block_size", block_size, least=1)
    enough = int(np.quantile(counts, quantile, method="higher"))
    return min(-(-enough // multiple) * multiple, block_size)


def patches_per_block(patches: Patches) -> Int[Array, "B N"]:
    """Patches in each block, as `calibrate_capacity` takes them; refused boundaries counted as patches."""
    return jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32) + patches.overflow


def _bracket(config: PatcherConfig) -> tuple[np.float32, np.float32]:
    """Thresholds that every byte and no byte exceeds."""
    if config.mode == "greedy":
        return np.float32(0), np.float32(MOST_NATS * config.block_size)
    return np.float32(-MOST_NATS - 1), np.float32(MOST_NATS + 1)


def _mean_length(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Float[Array, ""]:
    ids = jnp.zeros(entropies.shape, jnp.int32)
    ends = to_blocks(closes_at(config, ids, entropies, segment_ids, threshold), config.block_size)
    valid = to_blocks(segment_ids, config.block_size) > 0
    begins = jnp.concatenate([jnp.ones_like(ends[..., :1]), ends[..., :-1]], -1) & valid
    count = jnp.sum(begins, dtype=jnp.int32)
    return jnp.sum(valid, dtype=jnp.int32).astype(jnp.float32) / count.astype(jnp.float32)
