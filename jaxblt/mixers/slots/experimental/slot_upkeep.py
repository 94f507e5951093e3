"""Housekeeping of slot memories between calls: how full and how old they are, and which slots to free.

Pure functions of a `SlotMemoryState`. Shapes never change, and slots that stay keep every bit. Arrays may have leading
axes, such as the layers of a scanned stack.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.slots.experimental.slot_bank import SlotBank, free
from jaxblt.mixers.slots.experimental.slot_memory import SlotMemoryState
from jaxblt.validation import number, whole


@flax.struct.dataclass
class SlotStats:
    """The statistics of each row's and head's slots; means are over slots that hold something, 0 where none does.

    Attributes:
      utilisation: share of slots that hold something.
      usage: mean usage.
      age: mean age, in intervals since a slot's last write.
      oldest: largest age.
    """

    utilisation: Float[Array, "*L B H"]
    usage: Float[Array, "*L B H"]
    age: Float[Array, "*L B H"]
    oldest: Int[Array, "*L B H"]


def memory_stats(state: SlotMemoryState) -> SlotStats:
    """Return the statistics of a state's slots.

    Raises:
      ValueError: the state is not that of a slot memory.
    """
    bank = _bank_of("memory_stats", state)
    count = jnp.maximum(jnp.sum(bank.valid, -1, dtype=jnp.float32), 1)
    return SlotStats(
        utilisation=jnp.mean(bank.valid, -1, dtype=jnp.float32),
        usage=jnp.sum(jnp.where(bank.valid, bank.usage, 0), -1) / count,
        age=jnp.sum(jnp.where(bank.valid, bank.age, 0), -1).astype(jnp.float32) / count,
        oldest=jnp.max(jnp.where(bank.valid, bank.age, 0), -1),
    )


def reduce_slots(
    state: SlotMemoryState, *, keep: int | None = None, below: float | None = None
) -> SlotMemoryState:
    """Return the state with fewer slots in use.

    Freed slots have no weight in reads and are written first.

    Args:
      state: state of a slot memory.
      keep: keep this many slots of each row and head, the most used (the first ones if equal), and free the others.
      below: free the slots whose usage is below this.

    Raises:
      ValueError: neither or both of `keep` and `below` are given, they are out of range, or the state is not that of a
        slot memory.
    """
    bank = _bank_of("reduce_slots", state)
    if keep is not None and below is None:
        whole("keep", keep, least=0, most=bank.valid.shape[-1], why=": a bank has no more slots")
        gone = _rank(bank) >= keep
    elif below is not None and keep is None:
        number("below", below, least=0)
        gone = bank.usage < below
    else:
        raise ValueError(
            f"reduce_slots takes either keep or below, got keep={keep!r} and below={below!r}: give one of them"
        )
    carry = dataclasses.replace(state.carry, bank=free(bank, bank.valid & gone))
    return dataclasses.replace(state, carry=carry)


def _bank_of(name: str, state: Any) -> SlotBank:
    """Return a state's bank.

    Raises ValueError, which names the caller, for the state of another mixer.
    """
    if not isinstance(state, SlotMemoryState):
        raise ValueError(
            f"{name} takes a SlotMemoryState, got a {type(state).__name__}: of a model's state give that of one "
            "SlotMemoryConfig in its stack, such as state.stack.periods[0] of titan('slots')"
        )
    return state.bank


def _rank(bank: SlotBank) -> Int[Array, "*L B H S"]:
    """Rank slots: 0 for the most used one, then 1, 2, ...; free ones come last."""
    order = jnp.argsort(jnp.where(bank.valid, bank.usage, -1), axis=-1, descending=True, stable=True)
    return jnp.argsort(order, axis=-1)
