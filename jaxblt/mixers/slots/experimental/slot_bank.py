"""A bank of slots per row and head: how it is read, where a candidate is written, how slots age and are pruned.

Pure functions in fp32. Slots that no rule names keep every bit.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.cells.experimental.addressing import exact_product
from jaxblt.mixers.slots.state_slots import largest
from jaxblt.show import show
from pallas_kernels.neural_memory import multiply

SHORT = 1e-6
"""Added to squared lengths in cosines, so that an empty vector is like nothing."""
UNROLLED = 4
"""Candidates of a turn of the loop that writes them. Each takes few small kernels, and a turn's edges take as many."""


@flax.struct.dataclass
class SlotBank:
    """S slots of width M a row and head. A free slot is all zeros.

    Attributes:
      slots: what they hold.
      usage: how much they were read and written lately.
      age: intervals since the last write.
      valid: slots that hold something; the others are free, and weigh nothing in any read.
    """

    slots: Float[Array, "*L B H S M"]
    usage: Float[Array, "*L B H S"]
    age: Int[Array, "*L B H S"]
    valid: Bool[Array, "*L B H S"]

    __repr__ = show


class Candidates(NamedTuple):
    """The candidates that an interval offers to a bank, one after another.

    Attributes:
      content: s, to be written.
      query: w, what slots are compared with.
      kept: those that are written at all, unless `chosen` says so.
      chosen: the slots that each is written to, none if it is not, where they are given.
    """

    content: Float[Array, "L B H M"]
    query: Float[Array, "L B H M"]
    kept: Bool[Array, "L B H"]
    chosen: Bool[Array, "L B H S"] | None


def empty_bank(like: Float[Array, "B H"], slots: int, width: int) -> SlotBank:
    """Return free slots for the rows and heads of `like`, over whose devices they vary."""
    nothing = jnp.zeros_like(like, jnp.float32)[..., None]
    usage = jnp.tile(nothing, (1, 1, slots))
    return SlotBank(jnp.tile(usage[..., None], (1, 1, 1, width)), usage, usage.astype(jnp.int32), usage > 0)


def read_slots(
    bank: SlotBank, q: Float[Array, "B H C M"], sink: Float[Array, "H 2 M"], dtype: Any
) -> tuple[Float[Array, "B H C M"], Float[Array, "B H C S"]]:
    """Return what q reads from the slots and the sink, and the weights of slots, in fp32.

    o = p_0 sink value + sum_i p_i M_i with p = softmax over q . [sink key, M_i] / sqrt(M). A slot is key and value at
    once: matrices for both would fold into those of the queries and of the output. The sink takes what no slot should
    get. Free slots have p_i = 0.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    scores = multiply("bhcm,bhsm->bhcs", q, bank.slots, dtype) * scale
    none = multiply("bhcm,hm->bhc", q, sink[:, 0], dtype) * scale
    scores = jnp.where(bank.valid[:, :, None], scores, -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([none[..., None], scores], -1), -1)
    o = multiply("bhcs,bhsm->bhcm", p[..., 1:], bank.slots, dtype)
    return o + p[..., :1] * sink[None, :, 1, None], p[..., 1:]


def write_candidates(
    bank: SlotBank, reads: Float[Array, "B H S"], offered: Candidates, rules: Any
) -> tuple[SlotBank, Bool[Array, "L B H S"]]:
    """Return the bank behind an interval, and the slots that each candidate was written to.

    usage <- gamma usage + reads; candidates are written one after another; then valid slots grow older by an interval,
    those that were written are new.

    Args:
      bank: before it.
      reads: mean weights with which the interval's tokens read the slots.
      offered: candidates.
      rules: a `SlotMemoryConfig`.
    """
    bank = dataclasses.replace(bank, usage=rules.usage_decay * bank.usage + reads)

    def step(state: tuple[SlotBank, Array], one: Candidates) -> Any:
        bank, written = state
        chosen = one.chosen
        if chosen is None:
            chosen = find_slots(bank, one, rules) & one.kept[..., None]
        return (write_slots(bank, one, chosen, rules), written | chosen), chosen

    nowhere = bank.valid & ~bank.valid
    (bank, written), chosen = jax.lax.scan(step, (bank, nowhere), offered, unroll=UNROLLED)
    age = jnp.where(bank.valid & ~written, bank.age + 1, 0)
    return dataclasses.replace(bank, age=age), chosen


def find_slots(bank: SlotBank, one: Candidates, rules: Any) -> Bool[Array, "B H S"]:
    """Return the slots that a candidate is written to.

    These are the top k that it addresses, or the least used one if it is new. It is new if its best cosine with a valid
    slot is below `novelty`. Free slots are used least, of equals the first.
    """
    unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + SHORT)  # noqa: E731
    cosine = exact_product("bhm,bhsm->bhs", unit(one.content), unit(bank.slots))
    best = jnp.max(jnp.where(bank.valid, cosine, -jnp.inf), -1, keepdims=True)
    count = bank.valid.shape[-1]
    least = jax.nn.one_hot(jnp.argmin(jnp.where(bank.valid, bank.usage, -1), -1), count, dtype=bool)
    logits = jnp.where(bank.valid, _address_logits(bank, one, rules), -jnp.inf)
    likely = jnp.any(jax.nn.one_hot(largest(logits, rules.addressed), count, dtype=bool), -2)
    return jnp.where(best < rules.novelty, least, likely & bank.valid)


def write_slots(bank: SlotBank, one: Candidates, chosen: Bool[Array, "B H S"], rules: Any) -> SlotBank:
    """Write a candidate s: M_i <- M_i + (1 - rate) a_i (s - M_i).

    a is the softmax over chosen slots of w . M_i / sqrt(M) + beta (1 - usage_i). A free slot has nothing to keep and
    becomes s. The weight counts as use: a slot that was taken just now is not the least used one for the next
    candidate.
    """
    logits = jnp.where(chosen, _address_logits(bank, one, rules), jnp.finfo(jnp.float32).min)
    a = jnp.where(chosen, jax.nn.softmax(logits, -1), 0)
    gain = jnp.where(bank.valid, (1 - rules.rate) * a, a)[..., None]
    moved = bank.slots + gain * (one.content[:, :, None] - bank.slots)
    return SlotBank(
        slots=jnp.where(chosen[..., None], moved, bank.slots),
        usage=bank.usage + a,
        age=bank.age,
        valid=bank.valid | chosen,
    )


def unused(bank: SlotBank, rules: Any) -> Bool[Array, "B H S"]:
    """Return valid slots used less than `prune_below` and older than `prune_after` intervals."""
    return bank.valid & (bank.usage < rules.prune_below) & (bank.age > rules.prune_after)


def free(bank: SlotBank, gone: Bool[Array, "*L B H S"]) -> SlotBank:
    """Return the bank without the slots `gone`."""
    return SlotBank(
        slots=jnp.where(gone[..., None], 0, bank.slots),
        usage=jnp.where(gone, 0, bank.usage),
        age=jnp.where(gone, 0, bank.age),
        valid=bank.valid & ~gone,
    )


def _address_logits(bank: SlotBank, one: Candidates, rules: Any) -> Float[Array, "B H S"]:
    near = exact_product("bhm,bhsm->bhs", one.query, bank.slots) / math.sqrt(one.query.shape[-1])
    return near + rules.balance * (1 - bank.usage)
