"""The boundary rules: where each causal mode would end a patch, read from one byte and its predecessor.

The functions work elementwise, so the parallel pass and the byte-by-byte one decide by the same code.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.data.vocab import OFFSET
from jaxblt.patching.config import PatcherConfig

MIDDLE = 0.5
"""The probability above which a router ends a patch."""


def candidates(
    config: PatcherConfig,
    *,
    ids: Int[Array, "*S"],
    entropies: Float[Array, "*S"],
    previous: Float[Array, "*S"],
    first: Bool[Array, "*S"],
    offset: Int[Array, "*S"],
    threshold: Float[Array, ""],
) -> Bool[Array, "*S"]:
    """Mark where the rule would end a patch, without limits of length.

    Args:
      config: of mode entropy, learned, space, static or byte (greedy has a memory of its own).
      ids: byte + 4.
      entropies: H_t in nats; in mode learned p_t of the router.
      previous: H_{t-1}; not read where `first`.
      first: the first byte of a document.
      offset: of the byte in its block.
      threshold: nats.
    """
    if config.mode == "entropy":
        return first | _entropy_rule(config, entropies, previous, threshold)
    if config.mode == "learned":
        return first | (entropies > MIDDLE)
    if config.mode == "space":
        return ~_in_word(ids)
    if config.mode == "static":
        return (offset + 1) % config.patch_size == 0
    return jnp.ones(ids.shape, bool)


def lone_first(config: PatcherConfig, first: Bool[Array, "*S"]) -> Bool[Array, "*S"]:
    """Mark first bytes (BOS) that are a patch of their own, even if the dual rule asks for two."""
    return first if config.mode == "entropy" and config.min_length == 1 else jnp.zeros_like(first)


def _entropy_rule(
    config: PatcherConfig,
    entropies: Float[Array, "*S"],
    previous: Float[Array, "*S"],
    threshold: Float[Array, ""],
) -> Bool[Array, "*S"]:
    threshold = jnp.broadcast_to(threshold, entropies.shape)
    rise = entropies - previous
    if config.monotonic:
        return rise > threshold
    if config.threshold_add is not None:
        return (rise > jnp.float32(config.threshold_add)) & (entropies > threshold)
    return entropies > threshold


def _in_word(ids: Int[Array, "*S"]) -> Bool[Array, "*S"]:
    """Return True for ASCII letters and digits, and bytes (>= 0x80) of other characters."""
    byte = ids - OFFSET
    digit = (byte >= ord("0")) & (byte <= ord("9"))
    lower = byte | 0x20
    letter = (byte >= 0) & (lower >= ord("a")) & (lower <= ord("z"))
    return digit | letter | (byte >= 0x80)
