"""The causal modes one byte at a time: given the same entropies, the very boundaries of the parallel pass."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.patching import rules
from jaxblt.patching.config import PatcherConfig
from jaxblt.patching.fixed_point import fraction_bits, quantise, quantise_budget
from jaxblt.patching.patches import from_closed, to_blocks
from jaxblt.patching.segment import closes
from jaxblt.show import show


@flax.struct.dataclass
class PatcherState:
    """The state of each row's patcher after its last byte.

    Attributes:
      offset: bytes read of the block; block_size after its last byte.
      length: bytes since the rule last ended a patch.
      spent: fixed-point sum of their entropies.
      used: patches begun in the block, including those that got no slot. The patch that will hold the next byte is the
        block's number min(used, capacity), unless the block is over.
      wanted: boundaries inside blocks that the rule asked for so far in the document.
      overflow: those of them that were refused.
      last_entropy: nats.
      last_segment: document; 0 before the first byte.
    """

    offset: Int[Array, "B"]
    length: Int[Array, "B"]
    spent: Int[Array, "B"]
    used: Int[Array, "B"]
    wanted: Int[Array, "B"]
    overflow: Int[Array, "B"]
    last_entropy: Float[Array, "B"]
    last_segment: Int[Array, "B"]

    __repr__ = show


def init_patcher(config: PatcherConfig, batch_size: int) -> PatcherState:
    """Return the state before the first byte.

    Raises:
      ValueError: the mode is not causal, or has no threshold and needs one.
    """
    if not config.causal:
        raise ValueError(
            f"patching mode {config.mode!r} sees the future: it cannot run byte by byte, nor generate"
        )
    if config.has_threshold:
        config.known_threshold()
    counts = ("offset", "length", "spent", "used", "wanted", "overflow", "last_segment")
    # Make an array each, so that the state can be donated
    zeros = {name: jnp.zeros((batch_size,), jnp.int32) for name in counts}
    return PatcherState(last_entropy=jnp.zeros((batch_size,), jnp.float32), **zeros)


def step_patcher(
    config: PatcherConfig,
    state: PatcherState,
    ids: Int[Array, "B"],
    entropies: Float[Array, "B"],
    segment_ids: Int[Array, "B"],
) -> tuple[PatcherState, Bool[Array, "B"]]:
    """Read one byte a row and say whether its patch ends there.

    Args:
      config: a causal mode.
      state: of `init_patcher` or the last step.
      ids: byte + 4.
      entropies: nats, of the prediction made at this byte; in mode learned the router's p_t.
      segment_ids: the byte's document; 0 where a row gets no byte, which leaves its state as it was. A new
        document starts a new block.
    """
    live = segment_ids > 0
    entropies = entropies.astype(jnp.float32)
    first = live & (segment_ids != state.last_segment)
    began = _enter_block(config, state, first)
    ended, spent = _rule_ends(config, began, ids, entropies, first)
    edge = began.offset == config.block_size - 1
    wanted = ended | edge
    inside = (wanted & ~edge).astype(jnp.int32)
    refused = wanted & ~edge & (began.used >= config.slots)
    new = PatcherState(
        offset=began.offset + 1,
        length=jnp.where(wanted, 0, began.length + 1),
        spent=jnp.where(wanted, 0, spent),
        used=began.used + inside,
        wanted=began.wanted + inside,
        overflow=began.overflow + refused.astype(jnp.int32),
        last_entropy=entropies,
        last_segment=segment_ids,
    )
    kept = jax.tree.map(lambda after, before: jnp.where(live, after, before), new, state)
    return kept, wanted & ~refused & live


def stream_patcher(
    config: PatcherConfig,
    state: PatcherState,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> tuple[PatcherState, Bool[Array, "B T"]]:
    """Take `step_patcher` over T bytes, one after another, from any byte."""

    def step(state: PatcherState, byte: tuple[Array, ...]) -> tuple[PatcherState, Bool[Array, "B"]]:
        return step_patcher(config, state, *byte)

    state, closed = jax.lax.scan(step, state, (ids.T, entropies.T, segment_ids.T))
    return state, closed.T


def prefill_patcher(
    config: PatcherConfig,
    state: PatcherState,
    ids: Int[Array, "B T"],
    entropies: Float[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> tuple[PatcherState, Bool[Array, "B T"]]:
    """Take `step_patcher` over T bytes in one parallel pass.

    Each row has one document, with 0s behind it. Every row that goes on with the document of its state stands at a
    block's edge: it was fed whole blocks.
    """
    size = config.block_size
    entropies = entropies.astype(jnp.float32)
    goes_on = segment_ids[:, 0] == state.last_segment
    wanted = closes(config, ids, entropies, segment_ids, after=(state.last_segment, state.last_entropy))
    patches = from_closed(wanted, segment_ids, block_size=size, capacity=config.slots)
    count = jnp.sum(segment_ids > 0, 1, dtype=jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]
    block, offset = last // size, last % size

    def final(x: Shaped[Array, "B T"]) -> Shaped[Array, "B S"]:
        """Return each row's last block."""
        return jnp.take_along_axis(to_blocks(x, size), block[..., None], 1)[:, 0]

    index = jnp.arange(size, dtype=jnp.int32)[None]
    ends = final(wanted)
    since = index > jnp.max(jnp.where(ends, index, -1), 1, keepdims=True)
    spent = jnp.zeros_like(count)
    if config.mode == "greedy":
        nats = quantise(final(entropies), fraction_bits(size))
        spent = jnp.sum(jnp.where(since & (index <= offset), nats, 0), 1, dtype=jnp.int32)
    after = PatcherState(
        offset=offset[:, 0] + 1,
        length=jnp.sum(since & (index <= offset), 1, dtype=jnp.int32),
        spent=spent,
        used=1 + jnp.sum(ends & (index < size - 1), 1, dtype=jnp.int32),
        wanted=jnp.where(goes_on, state.wanted, 0)
        + jnp.sum(to_blocks(wanted, size)[..., :-1], (1, 2), dtype=jnp.int32),
        overflow=jnp.where(goes_on, state.overflow, 0) + jnp.sum(patches.overflow, 1, dtype=jnp.int32),
        last_entropy=jnp.take_along_axis(entropies, last, 1)[:, 0],
        last_segment=segment_ids[:, 0],
    )
    state = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), after, state)
    return state, patches.closed.reshape(len(ids), -1)[:, : ids.shape[1]]


def _enter_block(config: PatcherConfig, state: PatcherState, first: Bool[Array, "B"]) -> PatcherState:
    fresh = first | (state.offset == config.block_size)
    return state.replace(  # pyright: ignore[reportAttributeAccessIssue]
        offset=jnp.where(fresh, 0, state.offset),
        length=jnp.where(fresh, 0, state.length),
        spent=jnp.where(fresh, 0, state.spent),
        used=jnp.where(fresh, 1, state.used),
        wanted=jnp.where(first, 0, state.wanted),
        overflow=jnp.where(first, 0, state.overflow),
    )


def _rule_ends(
    config: PatcherConfig,
    state: PatcherState,
    ids: Int[Array, "B"],
    entropies: Float[Array, "B"],
    first: Bool[Array, "B"],
) -> tuple[Bool[Array, "B"], Int[Array, "B"]]:
    """Return whether rule and limits end the patch at this byte, and what the patch has spent."""
    threshold = jnp.float32(config.known_threshold() if config.has_threshold else 0.0)
    length, spent = state.length + 1, state.spent
    if config.mode == "greedy":
        bits = fraction_bits(config.block_size)
        spent = spent + quantise(entropies, bits)
        marks = spent > quantise_budget(threshold, bits)
    else:
        marks = rules.candidates(
            config,
            ids=ids,
            entropies=entropies,
            previous=state.last_entropy,
            first=first,
            offset=state.offset,
            threshold=threshold,
        )
    ended = (marks & (length >= config.shortest)) | rules.lone_first(config, first)
    return ended | (length >= config.longest), spent
