"""A gated linear recurrence: the smallest mixer with a state of constant size."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, linears
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.linear_scan import decayed, linear_scan


@dataclasses.dataclass(frozen=True)
class GatedRecurrenceConfig:
    """h_t = a_t h_{t-1} + (1 - a_t) u_t, a diagonal recurrence whose gates depend only on the input.

    "gated" has one gate, a_t = sigmoid(x_t W_a + b) (1709.04057; minGRU of 2410.01201, sec. 3.1.1). "minlstm" has a
    forget gate f and an input gate i that are normalised, a_t = f_t / (f_t + i_t), so that 1 - a_t = i_t / (f_t + i_t)
    (minLSTM of 2410.01201, sec. 3.2.1).

    Attributes:
      dim: width D.
      causal: True; the recurrence has no bidirectional form.
      cell: form of the gates, "gated" or "minlstm".
    """

    dim: int
    causal: bool = True
    cell: Literal["gated", "minlstm"] = "gated"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", least=1)
        if not self.causal:
            raise ValueError(
                "the gated recurrence runs forward only: use Hyena or attention when causal=False"
            )

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "GatedRecurrence":
        """Build the module; parameters are fp32, projections in `dtype`, the recurrence in fp32."""
        return GatedRecurrence(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "RecurrenceState":
        """Return h = 0, in fp32."""
        h = jnp.zeros((batch_size, self.dim), jnp.float32)
        return RecurrenceState(clock=start_clock(batch_size), h=h, cell=self.cell)


@flax.struct.dataclass
class RecurrenceState:
    """The clock of each row, h after its last token, and the cell that h is of."""

    clock: Clock
    h: Float[Array, "B D"]
    cell: str = flax.struct.field(pytree_node=False)

    __repr__ = show


class GatedRecurrence(nn.Module):
    """y = h W_out. Gates depend only on the input, so the recurrence is linear."""

    config: GatedRecurrenceConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: RecurrenceState | None = None,
    ) -> tuple[Float[Array, "B T D"], RecurrenceState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        check_kind(RecurrenceState, state, cell=self.config.cell)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=self.config.dim)
        biases = {"in": None, "gate": nn.initializers.constant(2.0)}
        if self.config.cell == "minlstm":
            biases["write"] = nn.initializers.zeros
        into = [self._linear(name, ("embed", "channels"), bias=bias) for name, bias in biases.items()]
        u, gate, *write = linears(rows.x, into)
        if write:
            gate = normalised(gate, *write)
        out = self._linear("out", ("channels", "embed"))
        h, after = rows.run(Recurrence(), (gate, u), None if state is None else state.h)
        y = rows.restore(out(h.astype(self.dtype)))
        return y, None if state is None else dataclasses.replace(state, clock=rows.clock, h=after)

    def _linear(self, name: str, axes: tuple[str, str], *, bias: Any = None) -> Linear:
        return Linear("btd,de->bte", {"e": self.config.dim}, axes, self.dtype, bias=bias, name=name)


def normalised(forget: Float[Array, "B T D"], write: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return g with sigmoid(g) = f / (f + i), in fp32.

    The gates are f = sigmoid(forget) and i = sigmoid(write). g = log f - log i, which neither gate makes overflow.
    """
    return jax.nn.log_sigmoid(forget.astype(jnp.float32)) - jax.nn.log_sigmoid(write.astype(jnp.float32))


@flax.struct.dataclass
class Recurrence:
    """Core of h_t = a_t h_{t-1} + (1 - a_t) u_t, in fp32; h passes holes unchanged and starts documents from zero."""

    def zero(self, streams: Any) -> Float[Array, "B D"]:
        """Return h before the first token."""
        return jnp.zeros(streams[0][:, 0].shape, jnp.float32)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B D"] | None
    ) -> tuple[Float[Array, "B T D"], tuple[Float[Array, "B D"], Float[Array, "B D"]]]:
        """Return h at each position, and the stretch's effect on a carry: a factor and a summand."""
        gate, u = (x.astype(jnp.float32) for x in streams)
        a = jax.nn.sigmoid(gate)
        # Clear gates of NaN, which are in `added` too: as factors they would pass the 0 at which the next document
        # begins.
        decay, added = marks.resets(jnp.where(jnp.isnan(a), 0, a)), marks.inputs((1 - a) * u)
        h = linear_scan(decay, added, initial=carry)
        return h, (jnp.zeros_like(h[:, 0]) if carry is not None else jnp.prod(decay, 1), h[:, -1])

    def join(self, carry: Float[Array, "B D"], summary: tuple[Array, Array]) -> Float[Array, "B D"]:
        """Return h behind the stretch."""
        decay, left = summary
        return decayed(decay, carry) + left
