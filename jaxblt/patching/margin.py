"""The distance of each boundary decision from tipping over.

Two programs that compute the same entropies differ in their last bits, and a comparison with a threshold can
turn that into a different patch. Equality of boundaries is to be asked for where the decision has a margin,
and the rest counted.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import fraction_bits, quantise, quantise_budget
from jaxblt.patching.patches import to_blocks
from jaxblt.patching.rules import MIDDLE
from jaxblt.patching.segment import closes_at


def boundary_margin(
    config: PatcherConfig, entropies: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the largest error (nats) of all entropies at which the rule decides alike at t.

    |H_t - threshold|, |H_t - H_{t-1} - threshold| / 2 (monotonic), the like for the conjunction (dual), and
    the distance of the sum from the budget over the number of its terms (greedy). In mode learned, where p
    stands for the entropies, |p - 1/2|. Infinite where entropies are not read: first bytes in modes entropy
    and learned, padding, and modes that read only bytes. Length limits are
    not taken into account here; `decided` does that.

    Raises:
      ValueError: the mode is not causal, or its threshold is not set.
    """
    if not config.causal:
        raise ValueError(f"mode={config.mode!r} has no margin at a byte: its patches are chosen together")
    valid = segment_ids > 0
    if not config.has_threshold and config.mode != "learned":
        return jnp.full(entropies.shape, jnp.inf, jnp.float32)
    entropies = entropies.astype(jnp.float32)
    if config.mode == "greedy":
        return jnp.where(valid, _greedy_margin(config, entropies, segment_ids), jnp.inf)
    before = jnp.pad(entropies[:, :-1], ((0, 0), (1, 0)))
    first = segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    margin = jnp.abs(_signed(config, entropies, entropies - before))
    return jnp.where(valid & ~first, margin, jnp.inf)


def decided(
    config: PatcherConfig, entropies: Float[Array, "B T"], segment_ids: Int[Array, "B T"], *, error: float
) -> Bool[Array, "B T"]:
    """Mark bytes at which two programs agree on a boundary, if their entropies differ by at most `error` nats.

    If a rule depends on where the patch began (greedy, dual, a length limit), one different boundary may change all
    later ones of the block. The marks are for the boundaries of `closes`, before capacity refuses any.
    """
    clear = boundary_margin(config, entropies, segment_ids) > error
    remembers = config.mode == "greedy" or config.shortest > 1 or config.max_length is not None
    if not remembers:
        return clear
    blocks = to_blocks(clear, config.block_size).astype(jnp.int32)
    settled = jax.lax.cummin(blocks, axis=2).astype(bool)
    return settled.reshape(clear.shape[0], -1)[:, : clear.shape[1]]


def flip_rate(
    closed: Bool[Array, "*S"], other: Bool[Array, "*S"], segment_ids: Int[Array, "*S"]
) -> Float[Array, ""]:
    """Return the share of bytes at which two programs disagree on whether a patch ends."""
    valid = segment_ids > 0
    flips = jnp.sum((closed != other) & valid, dtype=jnp.int32)
    return flips.astype(jnp.float32) / jnp.maximum(jnp.sum(valid, dtype=jnp.int32), 1).astype(jnp.float32)


def _signed(
    config: PatcherConfig, entropies: Float[Array, "B T"], rise: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    over = jnp.float32(MIDDLE if config.mode == "learned" else config.known_threshold())
    if config.monotonic:
        return (rise - over) / 2
    if config.threshold_add is not None:
        return jnp.minimum((rise - jnp.float32(config.threshold_add)) / 2, entropies - over)
    return entropies - over


def budget_sums(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> Float[Array, "B T"]:
    """Sum the entropies, in nats, from each patch's first byte to the byte (mode greedy)."""
    since, _ = _spent_since_start(config, entropies, segment_ids, threshold)
    nats = since.astype(jnp.float32) / jnp.float32(2 ** fraction_bits(config.block_size))
    return nats.reshape(entropies.shape[0], -1)[:, : entropies.shape[1]]


def _spent_since_start(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
) -> tuple[Int[Array, "B N S"], Int[Array, "B N S"]]:
    """Return fixed-point sums from each patch's first byte, and how many terms they have."""
    spent = jnp.where(segment_ids > 0, quantise(entropies, fraction_bits(config.block_size)), 0)
    spent = to_blocks(spent, config.block_size)
    ends = closes_at(config, jnp.zeros_like(segment_ids), entropies, segment_ids, threshold)
    ends = to_blocks(ends, config.block_size)
    begins = jnp.concatenate([jnp.ones_like(ends[..., :1]), ends[..., :-1]], -1)
    at = jnp.broadcast_to(jnp.arange(config.block_size, dtype=jnp.int32), begins.shape)
    start = jax.lax.cummax(jnp.where(begins, at, 0), axis=2)
    total = jnp.cumsum(spent, -1, dtype=jnp.int32)
    return total - jnp.take_along_axis(total - spent, start, -1), at - start + 1


def _greedy_margin(
    config: PatcherConfig, entropies: Float[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    threshold = jnp.float32(config.known_threshold())
    bits = fraction_bits(config.block_size)
    since, terms = _spent_since_start(config, entropies, segment_ids, threshold)
    gap = jnp.abs(since - quantise_budget(threshold, bits)).astype(jnp.float32)
    # Subtract a unit: each term was rounded down, by less than that.
    margin = (gap / terms.astype(jnp.float32) - 1) / jnp.float32(2**bits)
    return jnp.maximum(margin, 0.0).reshape(entropies.shape[0], -1)[:, : entropies.shape[1]]
