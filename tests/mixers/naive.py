"""Mixers whose cores leave to the driver all that it promises.

They tell no hole and no padding from a token, and do not start a document that begins at a stretch's first position.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from jaxblt.layers import Linear
from jaxblt.mixers.driver.base import Clock, select_rows, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import read

HEADS = 4


@dataclasses.dataclass(frozen=True)
class NaiveConfig:
    """h_t = w h_{t-1} + u_t, whose stretches are joined, or h_t = tanh(w h_{t-1} + u_t), whose are not.

    If not causal, the sum of h from the row's start and of h from its end.
    """

    dim: int = 8
    causal: bool = True
    joins: bool = True

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> nn.Module:
        return Naive(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> Any:
        return NaiveState(start_clock(batch_size), jnp.zeros((batch_size, HEADS, self.dim // HEADS)))


@flax.struct.dataclass
class NaiveState:
    clock: Clock
    h: jax.Array


@flax.struct.dataclass
class NaiveSteps:
    """A core without `join`."""

    weight: jax.Array
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("weight",))

    def zero(self, u: jax.Array) -> jax.Array:
        return jnp.zeros_like(u[:, 0])

    def run(self, u: jax.Array, marks: Marks, carry: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        zero = self.zero(u)

        def step(h: jax.Array, u: jax.Array) -> jax.Array:
            return jnp.tanh(self.weight[None] * h + u)

        y = _loop(step, zero if carry is None else carry, u, marks, zero)
        return y, _at_end(y, marks)


@flax.struct.dataclass
class NaiveJoined:
    """A core whose summary is how much of a carry is kept, and what is added."""

    weight: jax.Array

    def zero(self, u: jax.Array) -> jax.Array:
        return jnp.zeros_like(u[:, 0])

    def run(self, u: jax.Array, marks: Marks, carry: jax.Array | None) -> tuple[jax.Array, Any]:
        zero = self.zero(u)

        def step(effect: Any, u: jax.Array) -> Any:
            kept, added = effect
            return self.weight[None] * kept, self.weight[None] * added + u

        kept, added = effect = _loop(step, (jnp.ones_like(zero), zero), u, marks, (zero, zero))
        y = added if carry is None else kept * carry[:, None] + added
        return y, _at_end(effect, marks)

    def join(self, carry: jax.Array, summary: Any) -> jax.Array:
        kept, added = summary
        return kept * carry + added


def _loop(step: Any, start: Any, u: jax.Array, marks: Marks, begin: Any) -> Any:
    """What is carried behind each token `[B, T, ...]`; documents start from `begin`, except at the first position."""
    new = jnp.zeros(u.shape[:2], bool) if marks.new is None else marks.new.at[:, 0].set(False)

    def body(carry: Any, token: Any) -> tuple[Any, Any]:
        u, new = token
        after = step(select_rows(new, begin, carry), u)
        return after, after

    _, every = jax.lax.scan(body, start, (jnp.moveaxis(u, 1, 0), new.T))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), every)


def _at_end(every: Any, marks: Marks) -> Any:
    """What was carried behind each row's last token; in rows without one it is behind padding, and of no use."""
    if marks.end is None:
        return jax.tree.map(lambda x: x[:, -1], every)
    last = jnp.maximum(marks.end - 1, 0)
    return jax.tree.map(lambda x: jnp.take_along_axis(x, last[:, None, None, None], 1)[:, 0], every)


class Naive(nn.Module):
    config: NaiveConfig
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, *, segment_ids: Any = None, positions: Any = None, state: Any = None) -> Any:
        dim, clock = self.config.dim, None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=dim)
        sizes, names = {"h": HEADS, "k": dim // HEADS}, ("embed", "heads", "head_dim")
        u = Linear("btd,dhk->bthk", sizes, names, self.dtype, name="in")(rows.x)
        weight = self.param("weight", nn.initializers.constant(0.5), (HEADS, dim // HEADS))
        core = NaiveJoined(weight) if self.config.joins else NaiveSteps(weight)
        u = u.astype(jnp.float32)
        h, after = rows.run(core, u, None if state is None else state.h)
        if not self.config.causal:
            h = h + rows.run(core, u, reverse=True)[0]
        out = Linear("bthk,hkd->btd", {"d": dim}, (*names[1:], names[0]), self.dtype, name="out")
        y = rows.restore(out(h.astype(self.dtype)))
        return y, None if state is None else NaiveState(rows.clock, after)
