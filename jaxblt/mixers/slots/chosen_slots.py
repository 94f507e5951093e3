"""Slots of which each token writes to a few: a chunk of tokens computes the slots that it writes to, and no others.

Routes to the k likeliest of S slots are zeros nearly everywhere, but scattered, so that products in tiles skip little.
C tokens write to at most C k slots. Gathered, these are a small engine of their own. The others stay as they are for
the whole chunk, and are only read.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.slots.state_slots import SlotCore, Slots, SlotStreams, only_allowed, written
from pallas_kernels.gated_linear_attention import gated_linear_attention


@flax.struct.dataclass
class ChosenCore(SlotCore):
    """A `SlotCore` whose streams name the slots that they write to, and that computes these alone."""

    def run(
        self, streams: SlotStreams, marks: Marks, carry: Slots | None
    ) -> tuple[tuple[Float[Array, "B T H V"], Float[Array, "B T H S"]], tuple[None, Slots | None]]:
        """Return what tokens read, and where; with a carry also the slots behind the stretch."""
        first = self.zero(streams) if carry is None else carry
        found, after = write_chosen(streams, self.bias, marks, first, self.chunk_size)
        return found, (None, None if carry is None else after)


def write_chosen(
    streams: SlotStreams, bias: Float[Array, "H S"], marks: Marks, slots: Slots, chunk_size: int
) -> tuple[tuple[Float[Array, "B T H V"], Float[Array, "B T H S"]], Slots]:
    """Return what `write_and_read` returns, chunk by chunk, where tokens write to `streams.chosen` alone."""
    length, size = streams.q.shape[1], chunk_size
    count = -(-length // size)
    spare = count * size - length
    ids = marks.segment_ids
    if spare and ids is None:
        ids = jnp.ones(streams.q.shape[:2], jnp.int32)
    new = marks.new
    if ids is not None and new is None:
        new = jnp.zeros(ids.shape, bool)

    def pieces(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, spare), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(slots: Slots, piece: Any) -> tuple[Slots, Any]:
        own, ids, new = piece
        found, slots = _chunk(own, ids, new, bias, slots)
        return slots, found

    slots, found = jax.lax.scan(step, slots, jax.tree.map(pieces, (streams, ids, new)))
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]  # noqa: E731
    return jax.tree.map(whole, found), slots


def _chunk(
    streams: SlotStreams,
    ids: Int[Array, "B C"] | None,
    new: Bool[Array, "B C"] | None,
    bias: Float[Array, "H S"],
    slots: Slots,
) -> tuple[tuple[Float[Array, "B C H V"], Float[Array, "B C H S"]], Slots]:
    q, k, v, gate = streams.q, streams.k, streams.v, streams.log_gate
    assert streams.chosen is not None
    here = _distinct(streams.chosen, gate.shape[-1])
    alive, stays, asked = None, None, q.astype(jnp.float32)
    if new is not None:
        assert ids is not None
        slots, alive, stays = _documents(ids, new, slots)
        asked = jnp.where((ids > 0)[..., None, None], asked, 0)  # Avoid NaN that may lie in holes
    own = Slots(_take(slots.keys, here), _turned(_take(_turned(slots.values), here)))
    gate = _of_tokens(_take, gate, here)
    share, options = written(gate, v.dtype), {"segment_ids": ids, "output_final_state": True}
    now, keys = gated_linear_attention(q, k, share, log_value_gate=gate, initial_state=own.keys, **options)
    scores = _held(_product("bthk,bhks->bths", asked, slots.keys), alive)
    scores = scores * q.shape[-1] ** -0.5
    scores = _of_tokens(_put, scores, here, now.astype(jnp.float32)) + bias[None, None]
    reads = jax.nn.softmax(only_allowed(scores, streams.mask), -1)
    rest = _held(_of_tokens(_put, reads, here, jnp.zeros(now.shape, jnp.float32)), alive)
    found = _of_tokens(_take, reads, here).astype(v.dtype)
    options |= {"log_key_gate": gate, "initial_state": own.values, "scale": 1.0}
    o, values = gated_linear_attention(found, share, v, **options)
    o = o + _product("bths,bhsv->bthv", rest, slots.values).astype(o.dtype)
    left = slots if stays is None else jax.tree.map(lambda x: jnp.where(stays, x, 0), slots)
    after = Slots(_put(left.keys, here, keys), _turned(_put(_turned(left.values), here, _turned(values))))
    return (o, reads), after


def _documents(
    ids: Int[Array, "B C"], new: Bool[Array, "B C"], slots: Slots
) -> tuple[Slots, Bool[Array, "B C 1 1"], Bool[Array, "B 1 1 1"]]:
    """Return slots without those of a document that ended, and where they count: for which tokens, and behind all."""
    place = jnp.argmax(ids != 0, 1, keepdims=True)
    begins = jnp.take_along_axis(new, place, 1)
    started = jnp.cumsum(new, axis=1, dtype=jnp.int32) - begins.astype(jnp.int32)
    kept = jax.tree.map(lambda x: jnp.where(begins[..., None, None], 0, x), slots)
    return kept, ((started == 0) & (ids > 0))[..., None, None], (started[:, -1:] == 0)[..., None, None]


def _distinct(chosen: Int[Array, "B C H k"], count: int) -> Int[Array, "B H U"]:
    """Return the slots that any token chose, each once; what is left over names the slot `count`, which is none."""
    flat = jnp.moveaxis(chosen, 2, 1).reshape(chosen.shape[0], chosen.shape[2], -1)
    ordered = jnp.sort(flat, axis=-1)
    again = jnp.pad(ordered[..., 1:] == ordered[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return jnp.where(again, count, ordered)


def _product(equation: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute an einsum at the highest precision: slots are held in fp32."""
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


def _held(x: Float[Array, "B C H _"], alive: Bool[Array, "B C 1 1"] | None) -> Float[Array, "B C H _"]:
    return x if alive is None else jnp.where(alive, x, 0)


def _take(x: Float[Array, "B H _ S"], here: Int[Array, "B H U"]) -> Float[Array, "B H _ U"]:
    """Return the slots `here`, zeros of one that is none."""
    take = lambda x, here: jnp.take(x, here, axis=1, mode="fill", fill_value=0)  # noqa: E731
    return jax.vmap(jax.vmap(take))(x, here)


def _put(
    x: Float[Array, "B H _ S"], here: Int[Array, "B H U"], new: Float[Array, "B H _ U"]
) -> Float[Array, "B H _ S"]:
    """Return x with the slots `here` replaced."""
    put = lambda x, here, new: x.at[:, here].set(new, mode="drop")  # noqa: E731
    return jax.vmap(jax.vmap(put))(x, here, new)


def _of_tokens(call: Any, x: Float[Array, "B C H S"], here: Any, *new: Any) -> Float[Array, "B C H _"]:
    """Call `_take` or `_put` on arrays whose heads stand behind their tokens."""
    turned = [jnp.swapaxes(one, 1, 2) for one in (x, *new)]
    return jnp.swapaxes(call(turned[0], here, *turned[1:]), 1, 2)


def _turned(x: Float[Array, "B H X Y"]) -> Float[Array, "B H Y X"]:
    return jnp.swapaxes(x, 2, 3)
