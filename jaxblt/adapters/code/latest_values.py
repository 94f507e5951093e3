"""Values that a router computes now and then along a document, such as once a chunk, and keeps in between."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.driver.marks import Marks
from pallas_kernels.runtime import vary_alike


@flax.struct.dataclass
class LatestValues:
    """Core of values that are computed at steps and stay from one to the next.

    Streams are what a step reads, a pytree of arrays [B, T, ...], and where steps are, [B, T]. A document before its
    first step has the values of the document before it: the reader hides them. A stretch shorter than `size`, such as
    a decoded token, computes nothing if no row has a step in it. Under `vmap` it does:
    there a `cond` runs both branches.

    Attributes:
      weights: that `compute` is given.
      compute: (weights, what the steps read [B, N, ...]) -> values [B, N, F].
      width: F.
      size: tokens from one step to the next, at least.
    """

    weights: Any
    compute: Callable[[Any, Any], Array] = flax.struct.field(pytree_node=False)
    width: int = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)

    def zero(self, streams: Any) -> Float[Array, "B F"]:
        """Return zeros: nothing was computed."""
        return self._zeros(streams[1])[:, 0]

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B F"] | None
    ) -> tuple[Float[Array, "B T F"], tuple[Bool[Array, "B 1"], Float[Array, "B F"]]]:
        """Return the values of the latest step at each token; whether the stretch has a step, and its last values."""
        read, steps = streams[0], _live(streams[1], marks)
        count = jnp.cumsum(steps, axis=1, dtype=jnp.int32)
        found = self._computed(read, steps, step_places(steps, count, self.size))
        start = self.zero(streams) if carry is None else carry
        values = jnp.concatenate([start[:, None], found], 1)
        y = jnp.take_along_axis(values, count[..., None], 1)
        return y, (count[:, -1:] > 0, y[:, -1])

    def summarise(self, streams: Any, marks: Marks) -> tuple[Bool[Array, "B 1"], Float[Array, "B F"]]:
        """Return what `run` returns of the stretch, and compute one step instead of all."""
        read, steps = streams[0], _live(streams[1], marks)
        index = jnp.arange(steps.shape[1], dtype=jnp.int32)[None]
        last = jnp.max(jnp.where(steps, index, 0), 1, keepdims=True)
        return jnp.any(steps, 1, keepdims=True), self._computed(read, steps, last)[:, 0]

    def join(self, carry: Float[Array, "B F"], summary: tuple[Any, Any]) -> Float[Array, "B F"]:
        """Return the values behind the stretch."""
        some, values = summary
        return jnp.where(some, values, carry)

    def _computed(
        self, read: Any, steps: Bool[Array, "B T"], place: Int[Array, "B N"]
    ) -> Float[Array, "B N F"]:
        """Return values at these places, of no account where there is no step."""
        length = steps.shape[1]
        taken = jnp.minimum(place, length - 1)
        read = jax.tree.map(lambda x: jnp.take_along_axis(x, _like(taken, x), 1), read)
        if length >= self.size:  # nearly always a step
            return self.compute(self.weights, read)
        # Backward, shared weights' gradients are summed over devices. Cast here, or the branch that does so waits for
        # devices that have no step.
        leaves, tree = jax.tree.flatten((self.weights, read))
        *leaves, taking, taken = vary_alike(*leaves, jnp.any(steps), taken)
        skipped = lambda weights, read: self._zeros(taken)  # noqa: E731
        return jax.lax.cond(taking, self.compute, skipped, *jax.tree.unflatten(tree, leaves))

    def _zeros(self, like: Bool[Array, "B N"] | Int[Array, "B N"]) -> Float[Array, "B N F"]:
        """Return zeros that lie on devices as `like` does."""
        return jnp.zeros_like(jnp.broadcast_to(like[..., None], (*like.shape, self.width)), jnp.float32)


def _like(place: Int[Array, "B N"], x: Array) -> Int[Array, "B N ..."]:
    return place.reshape(*place.shape, *(1,) * (x.ndim - 2))


def _live(steps: Bool[Array, "B T"], marks: Marks) -> Bool[Array, "B T"]:
    """Return the steps that are at a token or a hole."""
    return steps if marks.segment_ids is None else steps & (marks.segment_ids != 0)


def step_places(steps: Bool[Array, "B T"], count: Int[Array, "B T"], size: int) -> Int[Array, "B N"]:
    """Return the token of each step, in order; T where there are fewer than T // size + 1.

    Args:
      steps: where one is taken, at least `size` tokens apart.
      count: of steps up to each token.
      size: see `steps`.
    """
    rows, length = steps.shape
    most = length // size + 1
    token = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], steps.shape)
    if most == 1:
        return jnp.min(jnp.where(steps, token, length), 1, keepdims=True)
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    nothing = jnp.full((rows, most), length, jnp.int32)
    return nothing.at[row, jnp.where(steps, count - 1, most)].set(token, mode="drop")
