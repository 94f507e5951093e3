"""Thresholds and capacities found from a sample, since what an entropy model and a text ask for varies."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import MOST_NATS
from jaxblt.patching.margin import boundary_margin, budget_sums
from jaxblt.patching.patches import Patches, to_blocks
from jaxblt.patching.rules import MIDDLE
from jaxblt.patching.segment import closes_at
from jaxblt.validation import number, whole

RESOLUTION = 2e-7  # relative, above 1 nat: neighbouring fp32 numbers
NEAR = 2.5e-3
"""The relative distance from the target that the mean length may have for the sake of a wider gap."""
LEAST_GAP = 4e-5
"""Nats: entropies nearer to each other may be one value that was rounded differently."""
FAR = 0.25
"""The relative distance from the target that the mean length may have for the sake of a gap of that width."""
CANDIDATES = 48
"""Gaps that are looked at, the widest ones; in mode greedy thresholds at equal steps, which find wide gaps first."""


def calibrate_threshold(
    entropies: np.ndarray | Array,
    target_bytes_per_patch: float,
    *,
    config: PatcherConfig,
    segment_ids: np.ndarray | Array | None = None,
) -> float:
    """Return the threshold, in nats, whose mean patch length is nearest to the target.

    Bisection finds the place: the number of patches never grows with the threshold, in these modes and under
    any limits. The threshold is then the middle of a gap between neighbouring entropies: sums of them in mode greedy,
    rises if monotonic. It is the widest of the gaps whose mean length is within 0.25 % of the target, so that rounding
    flips none of the sample's boundaries. `threshold_margin` tells how far it may go. Slots are not limited here.

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
    sample, segments = _sample(entropies, segment_ids)
    achieved = partial(_mean_length, config, sample, segments)
    low, high = _bracket(config)
    least, most = float(achieved(low)), float(achieved(high))
    if not least <= target_bytes_per_patch <= most:
        raise ValueError(
            f"{target_bytes_per_patch} bytes per patch is out of reach: here mode={config.mode!r} with "
            f"min_length={config.min_length}, max_length={config.max_length}, block_size={config.block_size} "
            f"gives {least:.4g} to {most:.4g}"
        )
    nearest = _nearest(achieved, target_bytes_per_patch, low, high)
    return _in_widest_gap(config, sample, segments, achieved, nearest, target_bytes_per_patch)


def calibrate_cut(
    scores: np.ndarray | Array,
    target_bytes_per_patch: float,
    *,
    config: PatcherConfig,
    segment_ids: np.ndarray | Array | None = None,
) -> float:
    """Return the score above which bytes end patches whose mean length is nearest to the target.

    It lies between two neighbouring scores of the sample, which bisection finds. Limits and edges of blocks count,
    slots do not.

    Args:
      scores: [rows, bytes] or [bytes], of a router, on any scale.
      target_bytes_per_patch: mean length.
      config: of mode learned.
      segment_ids: documents, 0 for padding; None is one document a row.

    Raises:
      ValueError: the config is of another mode, or the scores are not finite or all alike.
    """
    if config.mode != "learned":
        raise ValueError(f"calibrate_cut is for mode='learned', got {config.mode!r}: see calibrate_threshold")
    number("target_bytes_per_patch", target_bytes_per_patch, above=0)
    sample, segments = _sample(scores, segment_ids)
    values = np.unique(np.asarray(sample)[np.asarray(segments) > 0])
    if len(values) < 2:
        raise ValueError(
            f"all scores of the sample are {values[0]:.4g}, and no threshold parts them: sample more data, or train "
            "the router first"
        )
    middles = (values[:-1] + values[1:]) / np.float32(2)

    @jax.jit
    def achieved(cut: Float[Array, ""]) -> Float[Array, ""]:
        # Mode learned reads p, and ends a patch above 1/2
        wanted = jnp.where(sample > cut, 2 * MIDDLE, 0.0).astype(jnp.float32)
        return _mean_length(config, wanted, segments, jnp.float32(0))

    low, high = 0, len(middles) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if float(achieved(middles[middle])) < target_bytes_per_patch:
            low = middle
        else:
            high = middle
    error = lambda i: abs(float(achieved(middles[i])) - target_bytes_per_patch)  # noqa: E731
    return float(middles[min((low, high), key=error)])


def threshold_margin(
    entropies: np.ndarray | Array,
    *,
    config: PatcherConfig,
    segment_ids: np.ndarray | Array | None = None,
) -> float:
    """Return the largest error (nats) that all entropies may have without moving a boundary.

    In mode entropy the distance of the threshold from the nearest entropy: see `boundary_margin`.

    Args:
      entropies: as for `calibrate_threshold`.
      segment_ids: as for `calibrate_threshold`.
      config: with its threshold.

    Raises:
      ValueError: the mode compares nothing with a threshold, or the threshold is not set.
    """
    sample, segments = _sample(entropies, segment_ids)
    return float(jax.jit(lambda *given: jnp.min(boundary_margin(config, *given)))(sample, segments))


def calibrate_capacity(
    patches_per_block: np.ndarray | Array, *, block_size: int, quantile: float = 0.999, multiple: int = 8
) -> int:
    """Return slots that suffice for a share `quantile` of blocks.

    They are rounded up to a multiple, and at most block_size.

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
    """Count the patches in each block, as `calibrate_capacity` takes them.

    Refused boundaries count as patches.
    """
    return jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32) + patches.overflow


def _sample(
    entropies: np.ndarray | Array, segment_ids: np.ndarray | Array | None
) -> tuple[Float[Array, "B T"], Int[Array, "B T"]]:
    # Check on the host, where nothing compiles
    sample = np.atleast_2d(np.asarray(entropies, np.float32))
    segments = np.ones(sample.shape) if segment_ids is None else np.atleast_2d(np.asarray(segment_ids))
    if segments.shape != sample.shape or not np.any(segments > 0):
        raise ValueError(
            f"the sample holds no bytes, or segment_ids differ in shape: {sample.shape}, {segments.shape}"
        )
    if not np.all(np.isfinite(sample)):
        raise ValueError("entropies must be finite, and so must scores: the model gave NaN or infinity")
    return jax.device_put(sample), jax.device_put(segments.astype(np.int32))


def _nearest(achieved: Callable[..., Array], target: float, low: np.float32, high: np.float32) -> np.float32:
    """Find the threshold in low..high whose mean length is nearest to the target, by bisection."""
    least, most = float(achieved(low)), float(achieved(high))
    while high - low > RESOLUTION * max(1.0, abs(low), abs(high)):
        middle = np.float32((low + high) / 2)
        length = float(achieved(middle))
        if length < target:
            low, least = middle, length
        else:
            high, most = middle, length
    return low if target - least < most - target else high


def _in_widest_gap(
    config: PatcherConfig,
    sample: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    achieved: Callable[..., Array],
    nearest: np.float32,
    target: float,
) -> float:
    """Return the middle of the widest gap whose mean length is near enough to the target.

    If none is near enough, it is as near as can be.
    """
    # Allow the mean lengths of the nearest threshold always: a short sample has few.
    allowed = max(NEAR * target, abs(float(achieved(nearest)) - target) * (1 + 1e-6))
    while True:
        width, middle = _widest_gap(config, sample, segments, achieved, nearest, target, allowed)
        if width >= LEAST_GAP or allowed > FAR * target:
            return middle
        allowed *= 2


def _widest_gap(
    config: PatcherConfig,
    sample: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    achieved: Callable[..., Array],
    nearest: np.float32,
    target: float,
    allowed: float,
) -> tuple[float, float]:
    """Return width and middle of the widest gap near the target.

    Its mean length is at most `allowed` bytes from the target.
    """
    ends = [_edge(achieved, nearest, side, target, allowed) for side in (-1.0, 1.0)]
    tried = np.append(_tried(config, sample, segments, *ends), nearest)
    errors = np.abs(np.array([float(achieved(threshold)) for threshold in tried]) - target)
    tried = tried[errors <= allowed] if np.any(errors <= allowed) else tried[-1:]
    gap = partial(_gap, config, sample, segments)
    low, high = np.array([jax.device_get(gap(threshold)) for threshold in tried]).T
    best = int(np.argmax(high - low))
    middle = np.clip((low[best] + high[best]) / np.float32(2), low[best], high[best])
    return float(high[best] - low[best]), float(middle)


def _tried(
    config: PatcherConfig,
    sample: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    low: np.float32,
    high: np.float32,
) -> np.ndarray:
    """Return thresholds in low..high that may lie in the widest gap."""
    if config.mode == "greedy":  # what is compared changes with the threshold
        return np.linspace(low, high, CANDIDATES, dtype=np.float32)
    compared, valid = (np.asarray(x) for x in _compared(config, sample, segments, high))
    values = np.unique(compared[valid & (compared >= low) & (compared <= high)])
    widest = np.sort(np.argsort(-np.diff(values), stable=True)[:CANDIDATES])
    return values[widest] + np.diff(values)[widest] / np.float32(2)


def _edge(
    achieved: Callable[..., Array], nearest: np.float32, side: float, target: float, allowed: float
) -> np.float32:
    """Return a threshold on one side whose mean length is not allowed, by doubling steps."""
    step = 1e-5 * max(1.0, abs(float(nearest)))
    while step < MOST_NATS:
        threshold = np.float32(nearest + side * step)
        if abs(float(achieved(threshold)) - target) > allowed:
            return threshold
        step *= 2
    return np.float32(nearest + side * step)


@partial(jax.jit, static_argnums=0)
def _gap(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return low and high: thresholds in [low, high) give the patches that this one gives."""
    compared, valid = _compared(config, entropies, segments, threshold)
    low, high = _bracket(config)
    over = compared > threshold
    return (
        jnp.max(jnp.where(valid & ~over, compared, low)),
        jnp.min(jnp.where(valid & over, compared, high)),
    )


@partial(jax.jit, static_argnums=0)
def _compared(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return what is compared with the threshold, and where it decides."""
    valid = segments > 0
    if config.mode == "greedy":
        return budget_sums(config, entropies, segments, threshold), valid
    inside = valid & (segments == jnp.pad(segments[:, :-1], ((0, 0), (1, 0))))
    before = jnp.pad(entropies[:, :-1], ((0, 0), (1, 0)))
    return entropies - before if config.monotonic else entropies, inside


def _bracket(config: PatcherConfig) -> tuple[np.float32, np.float32]:
    """Return thresholds that every byte and no byte exceeds."""
    if config.mode == "greedy":
        return np.float32(0), np.float32(MOST_NATS * config.block_size)
    return np.float32(-MOST_NATS - 1), np.float32(MOST_NATS + 1)


@partial(jax.jit, static_argnums=0)
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
