"""Segmentations of least cost, by exact dynamic programmes that read the whole block: they are not causal.

With w_t = max(0, H_t - threshold), the cost of a block's patches is

    patch_cost * (number of patches) + sum of w_t over the bytes t, except the last, that end no patch,

so ending a patch at t saves w_t. Write g(i) for the least cost of bytes 0..i-1, less the w_{i-1} saved by
starting a patch at i. Then the least cost of bytes 0..j-1 is

    patch_cost + min of g(i) over min_length <= j - i <= max_length.

Costs are integers (fixed point), so that the minimum is exact; of equal ones the longer patch is taken.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import fraction_bits, quantise
from jaxblt.patching.limits import chain
from jaxblt.patching.patches import Patches, to_blocks

UNREACHED = 2**31 - 1


def segment(
    config: PatcherConfig,
    entropies: Float[Array, "B N S"],
    valid: Bool[Array, "B N S"],
    threshold: Float[Array, ""],
) -> Bool[Array, "B N S"]:
    """Mark the last bytes of the cheapest patches of each block.

    Every length lies in min_length..max_length where the block's n bytes can be cut so; else the last patch
    alone is shorter. In mode length_constrained a block of n < block_size bytes gets num_patches, or n // min_length if
    those would be too short. It never gets fewer than n / max_length.

    Per block of S bytes, mode optimal takes O(S max_length) time and O(S) memory in S sequential steps. Mode
    length_constrained with K patches takes O(K S log max_length) time and 4 K S bytes in 2 K sequential steps.
    """
    blocks, size = entropies.shape[:2], config.block_size
    saved = _savings(config, entropies, valid, threshold).reshape(-1, size)
    count = jnp.sum(valid, -1, dtype=jnp.int32).reshape(-1)
    solve = _fixed_count if config.mode == "length_constrained" else _free_count
    starts = solve(config, saved, count)
    at = jnp.arange(1, size + 1, dtype=jnp.int32)[None]
    return (starts[:, 1:] & (at < count[:, None])).reshape(*blocks, size)


def segmentation_cost(
    config: PatcherConfig, patches: Patches, entropies: Float[Array, "B T"]
) -> Float[Array, "B N"]:
    """Return the cost in nats of each block's patches, whichever mode made them.

    sum over patches [i, j) of patch_cost + sum over i <= t <= j - 2 of max(0, H_t - threshold), by the
    config's patch_cost and threshold.

    Raises:
      ValueError: the config has no threshold, or blocks of another size.
    """
    if config.block_size != patches.block_size:
        raise ValueError(f"config has blocks of {config.block_size} bytes, patches of {patches.block_size}")
    valid = patches.patch_ids < patches.capacity
    threshold = jnp.float32(config.known_threshold())
    saved = _savings(config, to_blocks(entropies, config.block_size), valid, threshold)
    inside = (patches.patch_ids[..., 1:] == patches.patch_ids[..., :-1]) & valid[..., 1:]
    surprise = jnp.sum(jnp.where(inside, saved[..., :-1], 0), -1, dtype=jnp.int32)
    number = jnp.sum(patches.lengths > 0, -1, dtype=jnp.int32)
    total = surprise + number * _patch_cost(config)
    return total.astype(jnp.float32) / jnp.float32(2 ** _bits(config))


def _bits(config: PatcherConfig) -> int:
    return fraction_bits(config.block_size, config.patch_cost)


def _patch_cost(config: PatcherConfig) -> int:
    return int(config.patch_cost * 2 ** _bits(config))


def _savings(
    config: PatcherConfig,
    entropies: Float[Array, "B N S"],
    valid: Bool[Array, "B N S"],
    threshold: Float[Array, ""],
) -> Int[Array, "B N S"]:
    return jnp.where(valid, quantise(entropies.astype(jnp.float32) - threshold, _bits(config)), 0)


def _free_count(
    config: PatcherConfig, saved: Int[Array, "R S"], count: Int[Array, "R"]
) -> Bool[Array, "R S+1"]:
    """Mark starts of the cheapest patches, however many.

    The end is marked too, where it is a strict cut.
    """
    rows, size = saved.shape
    low, high = config.min_length, config.longest
    # Put g(i) at element i + high of `gain`: the elements before hold nothing, so that windows need no bounds.
    gain = jnp.full((rows, high + size + 1), UNREACHED, jnp.int32).at[:, high].set(0)

    def step(gain: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        end, saving = inputs
        window = jax.lax.dynamic_slice_in_dim(gain, end, high - low + 1, axis=1)
        least = jnp.min(window, -1)
        reached = jnp.where(least < UNREACHED, least + _patch_cost(config) - saving, UNREACHED)
        gain = jax.lax.dynamic_update_slice_in_dim(gain, reached[:, None], end + high, axis=1)
        start = end - high + jnp.argmin(window, -1).astype(jnp.int32)
        return gain, jnp.where(least < UNREACHED, start, -1)

    ends = jnp.arange(1, size + 1, dtype=jnp.int32)
    gain, parents = jax.lax.scan(step, gain, (ends, saved.T))
    parents = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), parents.T], -1)
    strict = jnp.take_along_axis(parents, count[:, None], -1)[:, 0]
    relaxed = _cheapest(gain[:, high:], count - high, count - 1)
    last = jnp.where(strict >= 0, strict, relaxed)
    row = jnp.arange(rows)
    parents = jnp.maximum(parents, 0).at[row, count].set(jnp.where(count > 0, last, 0))
    return chain(parents, count, longest_chain=-(-size // low) + 1)


def _fixed_count(
    config: PatcherConfig, saved: Int[Array, "R S"], count: Int[Array, "R"]
) -> Bool[Array, "R S+1"]:
    """Mark starts of the cheapest patches, num_patches of them where the bytes suffice."""
    rows, size = saved.shape
    low, high = config.min_length, config.longest
    assert config.num_patches is not None
    fewest, most = -(-count // high), count // low
    wanted = jnp.maximum(jnp.minimum(config.num_patches, most), fewest)
    # Leave the patches' own cost out: it is the same however they are cut.
    saved = jnp.pad(saved, ((0, 0), (1, 0)))
    gain = jnp.full((rows, size + 1), UNREACHED, jnp.int32).at[:, 0].set(0)

    def forward(gain: Array, _: None) -> tuple[Array, Array]:
        least = _sliding_min(gain, low, high)
        return jnp.where(least < UNREACHED, least - saved, UNREACHED), gain

    _, gains = jax.lax.scan(forward, gain, None, length=config.num_patches)

    def backward(end: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        number, gain = inputs
        nearest = jnp.where((number == wanted) & (most < fewest), 1, low)
        start = jnp.where(number <= wanted, _cheapest(gain, end - high, end - nearest), end)
        return start, start

    numbers = jnp.arange(1, config.num_patches + 1, dtype=jnp.int32)
    _, starts = jax.lax.scan(backward, count, (numbers, gains), reverse=True)
    row = jnp.arange(rows)[None]
    return jnp.zeros((rows, size + 1), bool).at[row, starts].set(True)


def _cheapest(gain: Int[Array, "R n"], low: Int[Array, "R"], high: Int[Array, "R"]) -> Int[Array, "R"]:
    """Return the first index in low..high with the least gain."""
    at = jnp.arange(gain.shape[-1], dtype=jnp.int32)[None]
    inside = (at >= low[:, None]) & (at <= high[:, None])
    return jnp.argmin(jnp.where(inside, gain, UNREACHED), -1).astype(jnp.int32)


def _sliding_min(x: Int[Array, "R n"], low: int, high: int) -> Int[Array, "R n"]:
    """Return the least of x[j - high], ..., x[j - low], by windows of doubling width."""
    size, width = x.shape[-1], high - low + 1
    x = jnp.pad(x, ((0, 0), (high, 0)), constant_values=UNREACHED)
    span = 1
    while 2 * span <= width:
        x = jnp.minimum(x[:, :-span], x[:, span:])
        span *= 2
    rest = width - span
    return jnp.minimum(x[:, :size], x[:, rest : rest + size])
