"""Past inputs as a carry, for what looks a fixed number of steps back: short convolutions, n-grams."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.mixers.driver.base import rows
from jaxblt.mixers.driver.marks import Marks

FEW = 8
"""The most taps whose sum is written out for one row."""


@flax.struct.dataclass
class Recent:
    """The last S inputs of a stretch, zero where they were not of the row's last document.

    Attributes:
      inputs: oldest first; zero where the stretch was shorter.
      steps: tokens and holes of the stretch up to its last; None if each of its positions is one.
      stays: rows in which no document began; None for all.
      length: positions of the stretch.
    """

    inputs: Shaped[Array, "B *D S"]
    steps: Int[Array, "B"] | None
    stays: Bool[Array, "B"] | None
    length: int = flax.struct.field(pytree_node=False)


def recent(u: Shaped[Array, "B *D T"], marks: Marks, size: int) -> Recent:
    """Return the last `size` inputs of a stretch."""
    padded = jnp.pad(u, ((0, 0),) * (u.ndim - 1) + ((size, 0),))
    end, length = marks.end, u.shape[-1]
    if end is None or marks.segment_ids is None:
        return Recent(padded[..., padded.shape[-1] - size :], None, None, length)
    last = jnp.take_along_axis(jnp.abs(marks.segment_ids), jnp.maximum(end - 1, 0)[:, None], 1)
    tokens = jnp.pad(jnp.maximum(marks.segment_ids, 0), ((0, 0), (size, 0)))
    same = _window(tokens, end, size) == last
    kept = jnp.where(_between(same, u), _window(padded, end, size), jnp.zeros((), u.dtype))
    return Recent(kept, end, marks.stays, length)


def joined(past: Shaped[Array, "B *D S"], after: Recent) -> Shaped[Array, "B *D S"]:
    """Return the last S inputs behind a stretch, from those before it and those in it."""
    size = past.shape[-1]
    if after.steps is None:
        kept = past[..., after.length :]
        # Avoid an eager pad of an array without an element in a `shard_map`, where XLA crashes
        added = ((0, 0),) * (past.ndim - 1) + ((0, size - kept.shape[-1]),)
        moved = jnp.pad(kept, added) if kept.shape[-1] else jnp.zeros_like(past)
    else:
        padded = jnp.pad(past, ((0, 0),) * (past.ndim - 1) + ((0, size),))
        moved = _window(padded, jnp.minimum(after.steps, size), size)
    if after.stays is not None:
        moved = jnp.where(rows(after.stays, moved), moved, jnp.zeros((), moved.dtype))
    return moved + after.inputs.astype(past.dtype)


def _window(x: Shaped[Array, "B *D N"], start: Int[Array, "B"], size: int) -> Shaped[Array, "B *D S"]:
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size, axis=-1))(x, start)


def _between(mask: Bool[Array, "B S"], like: Array) -> Bool[Array, "B *D S"]:
    return mask.reshape(mask.shape[0], *(1,) * (like.ndim - 2), mask.shape[1])


@flax.struct.dataclass
class ShortHistory:
    """Core of a convolution with few taps, in [B, D, T]: y = post_gate * (h * u + b u), u = pre_gate * v.

    The carry is the last S inputs. A convolution is linear. The convolution of the carry reaches a few steps of the
    stretch, and is added there. So no copy with the carry in front is needed.

    Attributes:
      op: the convolution, `(x, taps, *, segment_ids, bias, pre_gate, post_gate, ...)`.
      taps: [D, L], or [D, 2L - 1] centred if not causal.
      bias: [D], or None.
      size: S, at most L - 1.
      causal: otherwise the op sees both sides, and the carry holds those before the stretch.
      outside: only what the carry adds, through the taps of the other side: for rows read from their end.
      options: of the op.
      count: heads whose channels lie side by side, which a mesh may split.
    """

    op: Callable[..., Array] = flax.struct.field(pytree_node=False)
    taps: Float[Array, "D F"]
    bias: Float[Array, "D"] | None
    size: int = flax.struct.field(pytree_node=False)
    causal: bool = flax.struct.field(pytree_node=False, default=True)
    outside: bool = flax.struct.field(pytree_node=False, default=False)
    options: tuple[tuple[str, Any], ...] = flax.struct.field(pytree_node=False, default=())
    count: int = flax.struct.field(pytree_node=False, default=1)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("taps", "bias"))

    @property
    def reach(self) -> int:
        """Steps back that the carry tells of."""
        return self.size

    def zero(self, streams: Any) -> Float[Array, "B D S"]:
        """Return a past without inputs."""
        v = streams[0]
        return jnp.zeros((*v.shape[:2], self.size), v.dtype)

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (self.count,)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B D S"] | None
    ) -> tuple[Float[Array, "B D T"], Recent]:
        """Return outputs, and the last inputs."""
        v, pre_gate, post_gate = streams
        if self.outside:
            y = jnp.zeros_like(v)
        else:
            given = {"segment_ids": marks.segment_ids, "pre_gate": pre_gate, "post_gate": post_gate}
            y = self.op(v, self.taps, bias=self.bias, **given, **self._options(marks))
        if carry is not None and self.size:
            added = self._reached(carry.astype(v.dtype), marks, v.shape[-1])
            y = y + (added if post_gate is None else post_gate * added)
        return y, self.summarise(streams, marks)

    def summarise(self, streams: Any, marks: Marks) -> Recent:
        """Return the last inputs of the stretch, zero at holes."""
        v, pre_gate, _ = streams
        return recent(v if pre_gate is None else pre_gate * v, marks, self.size)

    def join(self, carry: Float[Array, "B D S"], summary: Recent) -> Float[Array, "B D S"]:
        """Return the last inputs behind the stretch."""
        return joined(carry, summary)

    def _options(self, marks: Marks) -> dict[str, Any]:
        options = dict(self.options)
        if options:
            options |= {"causal": self.causal, "segment_alignment": marks.alignment}
        return options

    def _reached(self, past: Float[Array, "B D S"], marks: Marks, length: int) -> Float[Array, "B D T"]:
        """Return what the carry adds to the steps of its document."""
        steps = min(self.size, length)
        centre = 0 if self.causal else self.taps.shape[1] // 2
        taps = self.taps[:, centre::-1] if self.outside else self.taps[:, centre:]
        if steps == 1:
            added = next_output(past, taps).astype(past.dtype)
        else:
            padded = jnp.pad(past, ((0, 0), (0, 0), (0, steps)))
            added = self.op(padded, taps, **dict(self.options))[..., -steps:]
        added = jnp.pad(added, ((0, 0), (0, 0), (0, length - steps)))
        return at_first_document(added, marks)


def at_first_document(added: Float[Array, "B D T"], marks: Marks) -> Float[Array, "B D T"]:
    """Keep what a carry adds to its own document: zero from the first that begins here."""
    if marks.segment_ids is None or marks.new is None:
        return added
    seen = (marks.segment_ids > 0) & (jnp.cumsum(marks.new, 1) == 0)
    return jnp.where(seen[:, None], added, jnp.zeros((), added.dtype))


def next_output(past: Float[Array, "B D S"], taps: Float[Array, "D F"]) -> Float[Array, "B D 1"]:
    """Return what the past adds to the next step: one fp32 product with taps from lag 1 on."""
    used = jnp.flip(taps[:, 1 : past.shape[-1] + 1], -1).astype(jnp.float32)
    wide = past.astype(jnp.float32)[..., past.shape[-1] - used.shape[-1] :]
    if len(past) == 1 and used.shape[-1] <= FEW:
        # Write the sum out: XLA ends a kernel at a sum over an axis
        each = [wide[..., i : i + 1] * used[None, :, i : i + 1] for i in range(used.shape[-1])]
        return reduce(jnp.add, each)
    return jnp.einsum("bds,ds->bd", wide, used, precision=jax.lax.Precision.HIGHEST)[..., None]
