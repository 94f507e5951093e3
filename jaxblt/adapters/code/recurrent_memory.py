"""A read: a GRU that takes one step a chunk, over the means of the chunks before."""

import dataclasses
from math import gcd
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.code.latest_values import step_places
from jaxblt.adapters.code.levels import Level
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.layers import Linear, named
from jaxblt.mixers.cells.cells import GRUCore
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.steps import per_block

HEADS = 8
"""Of the GRU where they divide its width: along `seq` devices take heads apart, as steps cannot be joined."""


@flax.struct.dataclass
class ChunkSteps:
    """Core of a GRU whose steps are the first tokens of chunks; between them h stays.

    Streams are the gates' inputs [B, T, H, 3, K], and [B, T, H, 1] where a step is taken and where it is a document's
    first. Steps are at least `size` tokens apart, so that T tokens are T/size steps of the loop.

    Attributes:
      recurrent, bias: as of `GRUCore`.
      size: tokens of a chunk.
    """

    recurrent: Float[Array, "H 3 K K"]
    bias: Float[Array, "H K"]
    size: int = flax.struct.field(pytree_node=False)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("recurrent", "bias"))

    def zero(self, streams: Any) -> Float[Array, "B H K"]:
        """Return h before a document's first step."""
        return jnp.zeros_like(streams[0][:, 0, :, 0], jnp.float32)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B H K"] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
        """Return h at each token, and behind the stretch."""
        u, steps, firsts = streams[0], streams[1][:, :, 0, 0], streams[2][:, :, 0, 0]
        if marks.segment_ids is not None:
            steps = steps & (marks.segment_ids != 0)
        count = jnp.cumsum(steps, axis=1, dtype=jnp.int32)
        place = step_places(steps, count, self.size)
        taken, there = jnp.minimum(place, steps.shape[1] - 1), place < steps.shape[1]
        inputs = jnp.take_along_axis(u, taken[:, :, None, None, None], 1)
        # Mask what stands for no step: a first step at the call's last token would begin a document once more
        first = jnp.take_along_axis(firsts, taken, 1) & there
        told = Marks(there.astype(jnp.int32), first)
        start = self.zero(streams) if carry is None else carry
        h, after = GRUCore(self.recurrent, self.bias).run(inputs, told, start)
        steps_with_start = jnp.concatenate([start[:, None].astype(h.dtype), h], 1)
        return jnp.take_along_axis(steps_with_start, count[:, :, None, None], 1), after


@dataclasses.dataclass(frozen=True)
class RecurrentMemory(Read):
    """A memory of all chunks before: s_k = GRU(s_{k-1}, m_{k - lag}) in chunk k, zero before chunk `lag`.

    m are chunk means. s is as wide as `RouterConfig.hidden`.
    """

    name: ClassVar[str] = "memory"

    def zero(self, config: Any, batch_size: int, dim: int) -> Float[Array, "B H K"]:
        """Return a memory of nothing."""
        return jnp.zeros((batch_size, *memory_shape(config)), jnp.float32)

    def width(self, config: Any, dim: int, level: Level) -> int:
        """Return the width of s, 0 for a prefix."""
        return 0 if level == "prefix" else config.hidden

    def hear(self, router: nn.Module, call: RouterInput, state: Any) -> tuple[Features, Any]:
        """Return s of each token's chunk."""
        heads, width = memory_shape(call.config)
        sizes, shape = {"h": heads, "g": 3, "k": width}, call.time.shape
        names = ("embed", "heads", None, "head_dim")
        zeros = nn.initializers.zeros
        gates = Linear("btd,dhgk->bthgk", sizes, names, bias=zeros, name="memory", parent=router)
        draw = named(per_block(nn.initializers.orthogonal(), 2), "heads", None, "head_dim", None)
        u = gates(call.chunk_mean)
        recurrent = router.param("memory_recurrent", draw, (heads, 3, width, width), jnp.float32)
        bias = router.param("memory_bias", named(zeros, "heads", "head_dim"), (heads, width), jnp.float32)
        known = (call.chunk >= call.config.lag)[..., None, None]
        steps = jnp.broadcast_to(known & call.starts_chunk[..., None, None], (*shape, heads, 1))
        firsts = steps & (call.chunk == call.config.lag)[..., None, None]
        core = ChunkSteps(recurrent, bias, call.config.chunk)
        h, after = call.rows.run(core, (u, steps, firsts), state)
        memory = jnp.where(known, h, 0.0).reshape(*shape, -1)
        return {"chunk": memory, "token": memory}, after


def memory_shape(config: Any) -> tuple[int, int]:
    """Return heads of the GRU and the width of each; together as wide as the router's hidden layer."""
    heads = gcd(HEADS, config.hidden)
    return heads, config.hidden // heads
