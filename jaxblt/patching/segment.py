"""Patches from bytes and entropies, a whole batch at once."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.array_checks import check_entropies, check_ids, check_like, check_rows, check_segments
from jaxblt.data.vocab import VOCAB_SIZE
from jaxblt.parallel.halo import before
from jaxblt.parallel.sequence import as_stretches, seq_axis
from jaxblt.patching import limits, optimal, rules
from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import fraction_bits, quantise, quantise_budget
from jaxblt.patching.patches import Patches, from_closed, to_blocks


def make_patches(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    entropies: Float[Array, "B T"] | None = None,
) -> Patches:
    """Group the bytes of each row into patches by the config's rule.

    Args:
      config: the rule, its limits and the static shapes.
      ids: byte + 4; BOS and EOS count as bytes.
      segment_ids: number of each position's document; 0 is padding and belongs to no patch. None for one document per
        row. Documents start at a block's edge.
      entropies: entropy in nats of the prediction made at each byte, for the modes that read entropies. In mode learned
        the p_t of the model's router.

    Raises:
      ValueError: the entropies or threshold of the mode are missing, or a shape differs from that of ids.
      ValueError: outside of jit an id, segment id or entropy is out of range.
    """
    check_rows("ids", ids)
    check_ids(ids, VOCAB_SIZE)
    if segment_ids is None:
        segment_ids = jnp.ones(ids.shape, jnp.int32)
    check_segments(segment_ids)
    if entropies is not None:
        check_entropies(entropies)
    closed = closes(config, ids, entropies, segment_ids)
    return from_closed(closed, segment_ids, block_size=config.block_size, capacity=config.slots)


LastByte = tuple[Int[Array, "B"], Float[Array, "B"]]
"""Document and entropy of the byte before each row's first one; document 0 where there is none."""


def closes(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"] | None,
    segment_ids: Int[Array, "B T"],
    *,
    after: LastByte | None = None,
) -> Bool[Array, "B T"]:
    """Mark the bytes at which the rule ends a patch, block edges included, before capacity refuses any.

    Rows begin at a block's edge. For a row that continues a document, `after` says what came before.
    """
    threshold = config.known_threshold() if config.has_threshold else 0.0
    entropies = read_entropies(config, ids, entropies)
    check_like("segment_ids", segment_ids, ids)
    return closes_at(config, ids, entropies, segment_ids, jnp.float32(threshold), after=after)


def read_entropies(
    config: PatcherConfig, ids: Int[Array, "B *T"], entropies: Float[Array, "B *T"] | None
) -> Float[Array, "B *T"]:
    """Return the entropies that the rule reads: those given, or zeros if it reads none.

    Raises:
      ValueError: the mode needs entropies and there are none, or they have another shape.
    """
    if entropies is not None:
        check_like("entropies", entropies, ids)
        return entropies
    if config.mode == "learned":
        raise ValueError(
            "mode='learned' cuts where a model's router says: call the model, which returns its patches"
        )
    if config.needs_entropies:
        raise ValueError(f"mode={config.mode!r} needs entropies: see jaxblt.patching.byte_entropies")
    return jnp.zeros(ids.shape, jnp.float32)


def closes_at(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
    *,
    after: LastByte | None = None,
) -> Bool[Array, "B T"]:
    """Compute `closes` with the threshold as an array, so that a search compiles once."""
    entropies = entropies.astype(jnp.float32)
    if after is None:
        after = _before_stretch(ids, segment_ids, entropies)
    valid = to_blocks(segment_ids, config.block_size) > 0
    if config.mode == "greedy":
        ends = _greedy(config, entropies, valid, threshold)
    elif config.causal:
        ends = _by_rule(config, ids, entropies, segment_ids, threshold, after)
    else:
        ends = optimal.segment(config, to_blocks(entropies, config.block_size), valid, threshold)
    edge = jnp.arange(config.block_size) == config.block_size - 1
    ends = (ends | edge[None, None]) & valid
    return ends.reshape(ids.shape[0], -1)[:, : ids.shape[1]]


def _before_stretch(
    ids: Int[Array, "B T"], segment_ids: Int[Array, "B T"], entropies: Float[Array, "B T"]
) -> LastByte | None:
    """Return what came before the rows, if a `shard_map` has split them along the sequence."""
    axis = seq_axis(ids)
    if axis is None or not axis.manual:
        return None
    _, segment_ids, entropies = as_stretches((ids, segment_ids, entropies), axis)
    return before(segment_ids, 1, axis=1)[:, 0], before(entropies, 1, axis=1)[:, 0]


def _by_rule(
    config: PatcherConfig,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    threshold: Float[Array, ""],
    after: LastByte | None,
) -> Bool[Array, "B N S"]:
    document, entropy = (None, None) if after is None else after
    offset = jnp.arange(ids.shape[1], dtype=jnp.int32) % config.block_size
    first = (segment_ids > 0) & (segment_ids != _shift(segment_ids, document))
    marks = rules.candidates(
        config,
        ids=ids,
        entropies=entropies,
        previous=_shift(entropies, entropy),
        first=first,
        offset=jnp.broadcast_to(offset, ids.shape),
        threshold=threshold,
    )
    marks = to_blocks(marks & (segment_ids > 0), config.block_size)
    if config.shortest == 1:
        return marks if config.max_length is None else limits.cut_long(marks, config.max_length)
    following = limits.next_from_candidates(marks, shortest=config.shortest, longest=config.longest)
    lone = rules.lone_first(config, to_blocks(first, config.block_size)[..., 0])
    following = following.at[..., 0].set(jnp.where(lone, 1, following[..., 0]))
    return limits.closes_from_next(following, shortest=config.shortest)


def _greedy(
    config: PatcherConfig,
    entropies: Float[Array, "B T"],
    valid: Bool[Array, "B N S"],
    threshold: Float[Array, ""],
) -> Bool[Array, "B N S"]:
    bits = fraction_bits(config.block_size)
    spent = jnp.where(valid, quantise(to_blocks(entropies, config.block_size), bits), 0)
    budget = quantise_budget(threshold, bits)
    following = limits.next_from_budget(spent, budget, shortest=config.min_length, longest=config.longest)
    return limits.closes_from_next(following, shortest=config.min_length)


def _shift(x: Shaped[Array, "B T"], first: Shaped[Array, "B"] | None) -> Shaped[Array, "B T"]:
    """Return each position's predecessor; zero before the first one without a `first`."""
    if first is None:
        return jnp.pad(x[:, :-1], ((0, 0), (1, 0)))
    return jnp.concatenate([first[:, None].astype(x.dtype), x[:, :-1]], 1)
