"""Slots: a head's S states, each a convex mixture of what was routed to it, and how tokens write and read them."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.driver.marks import Marks
from jaxblt.show import show
from pallas_kernels.gated_linear_attention import gated_linear_attention, gated_linear_attention_summary


@flax.struct.dataclass
class Slots:
    """The slots of each head, in fp32; slots without a token hold zeros.

    Attributes:
      keys: what a token's query is compared with.
      values: what it reads.
    """

    keys: Float[Array, "B H K S"]
    values: Float[Array, "B H S V"]

    __repr__ = show


@flax.struct.dataclass
class SlotStreams:
    """The streams of tokens for the slots.

    Attributes:
      q, k, v: queries, and the keys and values that are written.
      log_gate: logarithm of what each slot keeps of itself, at most 0.
      mask: share of each slot that there is, 0..1; None if there are all.
      chosen: the slots that are written to, where `chosen_slots` is to gather them; None otherwise.
    """

    q: Float[Array, "B T H K"]
    k: Float[Array, "B T H K"]
    v: Float[Array, "B T H V"]
    log_gate: Float[Array, "B T H S"]
    mask: Float[Array, "B T H S"] | None = None
    chosen: Int[Array, "B T H k"] | None = None


def empty_slots(streams: Any, count: int) -> Slots:
    """Return `count` slots a head before the first token.

    They are made of the streams, so that they vary over devices as those do.
    """
    k, v = streams.k[:, 0, ..., None], streams.v[:, 0, :, None]
    return Slots(
        keys=jnp.repeat(jnp.zeros_like(k, jnp.float32), count, 3),
        values=jnp.repeat(jnp.zeros_like(v, jnp.float32), count, 2),
    )


def only_allowed(logits: Float[Array, "... S"], mask: Float[Array, "... S"] | None) -> Float[Array, "... S"]:
    """Return logits whose softmax is that of `logits` times `mask`, divided by its sum."""
    if mask is None:
        return logits
    there = mask > 0
    return jnp.where(there, logits + jnp.log(jnp.where(there, mask, 1)), -jnp.inf)


def largest(logits: Float[Array, "... S"], count: int) -> Int[Array, "... count"]:
    """Return the indices of the `count` largest; of equal ones the first."""
    # Sort instead of a top-k: XLA gathers a top-k's operand that is split along another axis, but not a sort's
    return jnp.argsort(jax.lax.stop_gradient(logits), axis=-1, descending=True)[..., :count]


def routed(logits: Float[Array, "... S"], chosen: Int[Array, "... k"] | None = None) -> Float[Array, "... S"]:
    """Return the softmax over slots, in fp32.

    If some are `chosen` it is over these only, so that it still sums to 1.
    """
    logits = logits.astype(jnp.float32)
    if chosen is not None:
        kept = jnp.any(jax.nn.one_hot(chosen, logits.shape[-1], dtype=bool), -2)
        logits = jnp.where(kept, logits, -jnp.inf)
    return jax.nn.softmax(logits, -1)


def write_and_read(
    streams: SlotStreams,
    bias: Float[Array, "H S"],
    segment_ids: Int[Array, "B T"] | None,
    slots: Slots | None,
    chunk_size: int,
) -> tuple[tuple[Float[Array, "B T H V"], Float[Array, "B T H S"]], Slots | None]:
    """Return what tokens read, where, and the slots behind them (None if none were given).

    slot_s <- (1 - w_s) slot_s + w_s [k, v] with w_s = 1 - exp(log_gate_s), then o = sum_s p_s value_s with
    p = softmax_s(q . key_s / sqrt(K) + b_s). Two calls of the op (Zhang et al., 2409.07146, sec. 3): slots are the
    value channels of the first, which gives the scores, and the key channels of the second.
    """
    q, k, v, gate = streams.q, streams.k, streams.v, streams.log_gate
    options: dict[str, Any] = {
        "segment_ids": segment_ids,
        "chunk_size": chunk_size,
        "output_final_state": slots is not None,
    }
    keys: Any = None if slots is None else slots.keys
    values: Any = None if slots is None else slots.values
    share = written(gate, v.dtype)
    scores: Any = gated_linear_attention(q, k, share, log_value_gate=gate, initial_state=keys, **options)
    if slots is not None:
        scores, keys = scores
    scores = scores.astype(jnp.float32) + bias[None, None]
    reads = jax.nn.softmax(only_allowed(scores, streams.mask), -1)
    o: Any = gated_linear_attention(
        reads.astype(v.dtype), share, v, log_key_gate=gate, initial_state=values, scale=1.0, **options
    )
    if slots is None:
        return (o, reads), None
    o, values = o
    return (o, reads), Slots(keys, values)


def written(log_gate: Float[Array, "B T H S"], dtype: Any) -> Float[Array, "B T H S"]:
    """Return what each slot takes of a token."""
    return -jnp.expm1(log_gate).astype(dtype)


@flax.struct.dataclass
class SlotCore:
    """Core of slots that only tokens change: linear in the slots, so that stretches join. Streams are `SlotStreams`.

    Attributes:
      bias: b of the read scores.
    """

    bias: Float[Array, "H S"]
    chunk_size: int = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("bias",))

    def zero(self, streams: SlotStreams) -> Slots:
        """Return the slots before the first token."""
        return empty_slots(streams, self.bias.shape[1])

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (streams.q.shape[2],)

    def run(
        self, streams: SlotStreams, marks: Marks, carry: Slots | None
    ) -> tuple[tuple[Float[Array, "B T H V"], Float[Array, "B T H S"]], tuple[None, Slots | None]]:
        """Return what tokens read, and where; with a carry also the slots behind the stretch."""
        found, after = write_and_read(streams, self.bias, marks.segment_ids, carry, self.chunk_size)
        return found, (None, after)

    def summarise(self, streams: SlotStreams, marks: Marks) -> tuple[Slots, Slots]:
        """Return what the stretch multiplies the slots by, elementwise, and what it adds."""
        k, v, gate = streams.k, streams.v, streams.log_gate
        share = written(gate, v.dtype)
        ids = marks.segment_ids
        kept_keys, keys = gated_linear_attention_summary(k, share, log_value_gate=gate, segment_ids=ids)
        kept_values, values = gated_linear_attention_summary(share, v, log_key_gate=gate, segment_ids=ids)
        return Slots(kept_keys, kept_values), Slots(keys, values)

    def join(self, carry: Slots, summary: tuple[Slots | None, Slots]) -> Slots:
        """Return the slots behind the stretch."""
        kept, left = summary
        if kept is None:
            return left
        return jax.tree.map(lambda kept, old, left: kept * old + left, kept, carry, left)
