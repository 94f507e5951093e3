"""MAG: a neural memory beside attention over a window, mixed by a gate (Titans, memory as a gate)."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear
from jaxblt.mixers.attention.attention import AttentionConfig
from jaxblt.mixers.attention.kv_cache import AttentionState
from jaxblt.mixers.driver.base import blank, content_of
from jaxblt.mixers.driver.sequence import check_kind
from jaxblt.mixers.driver.steps import check_causal, check_divides
from jaxblt.mixers.memory.neural_memory import NeuralMemoryConfig, NeuralMemoryState
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class MAGConfig:
    """g * memory(x) + (1 - g) * attention(x), g = sigmoid(x W + b) (Behrouz et al., 2501.00663, sec. 4.2).

    Attributes:
      dim: width D.
      num_heads: heads of the memory and of attention; a multiple of the devices that split the sequence.
      head_dim: width K of a head; None for D / H.
      window: number of steps that attention sees; at least `chunk_size`, because the memory is up to a chunk old.
      depth, expand, chunk_size, short_taps: options of the memory, see `NeuralMemoryConfig`.
      causal: True; the memory has no bidirectional form.
      packed, segment_alignment: as in `NeuralMemoryConfig`.
    """

    dim: int
    num_heads: int = 4
    head_dim: int | None = None
    window: int = 512
    depth: int = 2
    expand: int = 4
    chunk_size: int = 64
    short_taps: int = 4
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "num_heads", "head_dim", "window", "expand", "chunk_size", "short_taps")
        check_bounds(self, *sizes, "segment_alignment", least=1)
        check_bounds(self, "depth", least=1, most=2)
        check_causal(self)
        check_divides(self)
        if self.window < self.chunk_size:
            raise ValueError(
                f"MAGConfig.window must be at least chunk_size = {self.chunk_size}, got {self.window}: nobody would "
                "see the tokens between them; widen the window or shorten the chunks"
            )
        # Make both configs, which check the rest.
        assert self.memory.dim == self.attention.dim

    @property
    def memory(self) -> NeuralMemoryConfig:
        """The config of the memory."""
        names = [field.name for field in dataclasses.fields(NeuralMemoryConfig)]
        return NeuralMemoryConfig(**{name: getattr(self, name) for name in names})

    @property
    def attention(self) -> AttentionConfig:
        """The config of the window."""
        return AttentionConfig(
            self.dim, self.num_heads, head_dim=self.head_dim, window=self.window, packed=self.packed
        )

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "MAG":
        """Build the module; parameters are fp32, products in `dtype`."""
        return MAG(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "MAGState":
        """Return the state of the memory, and a ring of `window` slots."""
        return MAGState(
            self.memory.init_state(batch_size, capacity=capacity, dtype=dtype),
            self.attention.init_state(batch_size, capacity=capacity, dtype=dtype),
        )


@flax.struct.dataclass
class MAGState:
    """The states of both branches."""

    memory: NeuralMemoryState
    attention: AttentionState

    __repr__ = show


class MAG(nn.Module):
    """g * memory(x) + (1 - g) * attention(x); a bias of the gate far above or below zero leaves one branch."""

    config: MAGConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: MAGState | None = None,
    ) -> tuple[Float[Array, "B T D"], MAGState | None]:
        """Return the output and the state after the tokens (None in training)."""
        config = self.config
        check_kind(MAGState, state)
        x = blank(x, content_of(segment_ids))
        given: Any = {"segment_ids": segment_ids, "positions": positions}
        memory = config.memory.build(dtype=self.dtype, name="memory")
        attention: Any = config.attention.build(dtype=self.dtype, name="attention")
        far, remembered = memory(x, **given, state=None if state is None else state.memory)
        near, cached = attention(x, **given, state=None if state is None else state.attention)
        sizes, names = {"e": config.dim}, ("embed", None)
        logits = Linear("btd,de->bte", sizes, names, self.dtype, bias=nn.initializers.zeros, name="gate")(x)
        gate = jax.nn.sigmoid(logits)
        y = gate * far + (1 - gate) * near
        if remembered is None or cached is None:
            return y, None
        return y, MAGState(remembered, cached)
