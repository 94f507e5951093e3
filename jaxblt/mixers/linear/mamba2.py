"""Mamba-2: a state space model with one decay per head, as linear attention (state space duality)."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import named
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.linear.gated_linear_attention import LinearState
from jaxblt.mixers.linear.matrix_state import (
    STEP_SIZES,
    Decay,
    HeadShape,
    MatrixState,
    Readout,
    Streams,
    check_forward,
)
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class Mamba2Config:
    """S_t = exp(-A dt_t) S_{t-1} + dt_t B_t x_t^T, y_t = S_t^T C_t + D x_t (Dao and Gu, 2405.21060).

    Attributes:
      dim: width D.
      expand: the inner width is this many times D.
      head_dim: width of a head's x; there are expand D / head_dim heads.
      state_dim: width N of B and C.
      num_groups: number of groups of heads that share B and C; a divisor of the number of heads.
      short_taps: taps of the short convolutions of x, B and C.
      step_sizes: the range of the initial dt, averaged over inputs. A head remembers about 1 / (A dt) steps.
      causal: True; the rule has no bidirectional form.
      chunk_size: number of steps that are computed at once, a power of two; the result does not depend on it.
    """

    dim: int
    expand: int = 2
    head_dim: int = 64
    state_dim: int = 128
    num_groups: int = 1
    short_taps: int = 4
    step_sizes: tuple[float, float] = STEP_SIZES
    causal: bool = True
    chunk_size: int = 64

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("dim", "expand", "head_dim", "state_dim", "num_groups", "short_taps", "chunk_size")
        check_bounds(self, *sizes, least=1)
        check_bounds(self, "step_sizes", above=0)
        if self.step_sizes[0] > self.step_sizes[1]:
            raise ValueError(f"Mamba2Config.step_sizes must be (least, most), got {self.step_sizes}")
        check_forward(self)
        inner = self.expand * self.dim
        if inner % (self.head_dim * self.num_groups):
            raise ValueError(
                f"Mamba2Config: expand = {self.expand} times dim = {self.dim} must be a multiple of "
                f"num_groups * head_dim = {self.num_groups} * {self.head_dim}: change one of them"
            )

    @property
    def shape(self) -> HeadShape:
        """Heads and widths: C is the query, B the key and x the value of linear attention."""
        heads = self.expand * self.dim // self.head_dim
        return HeadShape(heads, self.num_groups, self.state_dim, self.head_dim, self.short_taps)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Mamba2":
        """Build the module.

        Parameters are fp32, products in `dtype`, norms, decays and the state in fp32.
        """
        return Mamba2(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> MatrixState:
        """Return zero inputs and S = 0."""
        return self.shape.init_state(batch_size, dtype, "Mamba2")


class Mamba2(nn.Module):
    """C, B, x = silu(short_conv(u W)); output as in `Readout`, whose norm is over a head and before the gate."""

    config: Mamba2Config
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: MatrixState | None = None,
    ) -> tuple[Float[Array, "B T D"], MatrixState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config, shape = self.config, self.config.shape
        check_kind(MatrixState, state, mixer="Mamba2")
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        (c, b, v), short = Streams(shape, self.dtype, name="streams")(
            rows, None if state is None else state.short
        )
        log_gate, step = Decay(shape.heads, self.dtype, config.step_sizes, name="decay")(rows.x)
        streams = (c, b, v * step[..., None].astype(v.dtype), log_gate)
        core = LinearState("head", config.chunk_size, scale=1.0)
        o, memory = rows.run(core, streams, None if state is None else state.memory)
        skip = self.param("skip", named(nn.initializers.ones, "heads"), (shape.heads,), jnp.float32)
        o = o + skip.astype(v.dtype)[None, None, :, None] * v
        y = rows.restore(Readout(config.dim, self.dtype, name="readout")(o, rows.x))
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, memory=memory)
