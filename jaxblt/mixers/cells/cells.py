"""GRU and LSTM: cells whose gates read the state, so that tokens are taken one after another.

The width is split into heads of their own state, with recurrent weights of a block per head (as the sLSTM of xLSTM,
2405.04517, sec. 2.2). One head is the cell of the textbook. Where a mesh splits the sequence, heads are scattered.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import check_kind, read
from jaxblt.mixers.driver.steps import check_causal, per_block, take_steps
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields

UNROLL = 2


@dataclasses.dataclass(frozen=True)
class _CellConfig:
    dim: int
    num_heads: int = 4
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "num_heads", least=1)
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} does not divide among num_heads = {self.num_heads}: choose a divisor of dim"
            )
        check_causal(self)

    @property
    def width(self) -> int:
        """Width K of a head."""
        return self.dim // self.num_heads

    def _zeros(self, batch_size: int) -> Float[Array, "B H K"]:
        return jnp.zeros((batch_size, self.num_heads, self.width), jnp.float32)


@dataclasses.dataclass(frozen=True)
class GRUConfig(_CellConfig):
    """A gated recurrent unit (1406.1078); the reset gate acts after the product, as in cuDNN.

    r, z = sigmoid(x W + h U), n = tanh(x W_n + r * (h U_n + b_n)), h' = (1 - z) n + z h, per head.

    Attributes:
      dim: width D.
      num_heads: heads H, a divisor of D and a multiple of the devices that split the sequence.
      causal: True; the cell steps forward only.
    """

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "GRU":
        """Build the module; parameters are fp32, projections in `dtype`, the cell in fp32."""
        return GRU(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "GRUState":
        """Return h = 0, in fp32."""
        return GRUState(clock=start_clock(batch_size), h=self._zeros(batch_size))


@dataclasses.dataclass(frozen=True)
class LSTMConfig(_CellConfig):
    """A long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    i, f, o = sigmoid(x W + h U), g = tanh(x W_g + h U_g), c' = f c + i g, h' = o tanh(c'), per head. The forget gate's
    bias starts at 1.

    Attributes:
      dim: width D.
      num_heads: heads H, a divisor of D and a multiple of the devices that split the sequence.
      causal: True; the cell steps forward only.
    """

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "LSTM":
        """Build the module; parameters are fp32, projections in `dtype`, the cell in fp32."""
        return LSTM(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "LSTMState":
        """Return h = c = 0, in fp32."""
        h = self._zeros(batch_size)
        return LSTMState(clock=start_clock(batch_size), h=h, c=h)


@flax.struct.dataclass
class GRUState:
    """The clock of each row, and h after its last token."""

    clock: Clock
    h: Float[Array, "B H K"]

    __repr__ = show


@flax.struct.dataclass
class LSTMState:
    """The clock of each row, with the output h and the cell state c after its last token."""

    clock: Clock
    h: Float[Array, "B H K"]
    c: Float[Array, "B H K"]

    __repr__ = show


class GRU(nn.Module):
    """y = h W_out. One product projects the inputs of all gates and steps."""

    config: GRUConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: GRUState | None = None,
    ) -> tuple[Float[Array, "B T D"], GRUState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        config = self.config
        check_kind(GRUState, state)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=config.dim)
        u = _projected(config, 3, self.dtype, nn.initializers.zeros)(rows.x)
        zeros = named(nn.initializers.zeros, "heads", "head_dim")
        bias = self.param("recurrent_bias", zeros, (config.num_heads, config.width), jnp.float32)
        core = GRUCore(_recurrent(self, 3), bias)
        h, after = rows.run(core, u, None if state is None else state.h)
        y = rows.restore(_output(config, self.dtype)(h))
        return y, None if state is None else dataclasses.replace(state, clock=rows.clock, h=after)


class LSTM(nn.Module):
    """y = h W_out. One product projects the inputs of all gates and steps."""

    config: LSTMConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: LSTMState | None = None,
    ) -> tuple[Float[Array, "B T D"], LSTMState | None]:
        """Return the output and the next state (None in training); positions play no part."""
        check_kind(LSTMState, state)
        clock = None if state is None else state.clock
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, width=self.config.dim)
        u = _projected(self.config, 4, self.dtype, _remembers)(rows.x)
        core = LSTMCore(_recurrent(self, 4))
        y, after = rows.run(core, u, None if state is None else (state.h, state.c))
        y = rows.restore(_output(self.config, self.dtype)(y))
        if state is None or after is None:
            return y, None
        h, c = after
        return y, dataclasses.replace(state, clock=rows.clock, h=h, c=c)


@flax.struct.dataclass
class GRUCore:
    """Core of the GRU, in fp32. Streams are the projected inputs [B, T, H, 3, K] of r, z, n; the carry is h.

    Attributes:
      recurrent: U of r, z, n.
      bias: b_n.
    """

    recurrent: Float[Array, "H 3 K K"]
    bias: Float[Array, "H K"]
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("recurrent", "bias"))

    def zero(self, streams: Float[Array, "B T H 3 K"]) -> Float[Array, "B H K"]:
        """Return h before the first token."""
        return jnp.zeros_like(streams[:, 0, :, 0], jnp.float32)

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (streams.shape[2],)

    def run(
        self, streams: Float[Array, "B T H 3 K"], marks: Marks, carry: Float[Array, "B H K"] | None
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B H K"]]:
        """Return h at each position, and behind the stretch."""

        def step(h: Array, u: Array) -> tuple[Array, Array]:
            of_input, of_state = _gates(u), _recalled(h, self.recurrent)
            reset = jax.nn.sigmoid(of_input[0] + of_state[0])
            keep = jax.nn.sigmoid(of_input[1] + of_state[1])
            new = jnp.tanh(of_input[2] + reset * (of_state[2] + self.bias[None]))
            h = (1 - keep) * new + keep * h
            return h, h.astype(u.dtype)

        return take_steps(step, self.zero(streams), streams, marks, carry, unroll=UNROLL)


@flax.struct.dataclass
class LSTMCore:
    """Core of the LSTM, in fp32. Streams are the projected inputs [B, T, H, 4, K] of i, f, g, o; the carry is (h, c).

    Attributes:
      recurrent: U of i, f, g, o.
    """

    recurrent: Float[Array, "H 4 K K"]
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("recurrent",))

    def zero(self, streams: Float[Array, "B T H 4 K"]) -> tuple[Float[Array, "B H K"], Float[Array, "B H K"]]:
        """Return h and c before the first token."""
        nothing = jnp.zeros_like(streams[:, 0, :, 0], jnp.float32)
        return nothing, nothing

    def head_counts(self, streams: Any) -> tuple[int, ...]:
        """Return one count for all streams alike."""
        return (streams.shape[2],)

    def run(
        self, streams: Float[Array, "B T H 4 K"], marks: Marks, carry: tuple[Array, Array] | None
    ) -> tuple[Float[Array, "B T H K"], tuple[Float[Array, "B H K"], Float[Array, "B H K"]]]:
        """Return h at each position; h and c behind the stretch."""

        def step(carry: tuple[Array, Array], u: Array) -> tuple[tuple[Array, Array], Array]:
            h, c = carry
            pairs = zip(_gates(u), _recalled(h, self.recurrent), strict=True)
            write, keep, new, show = (of_input + of_state for of_input, of_state in pairs)
            c = jax.nn.sigmoid(keep) * c + jax.nn.sigmoid(write) * jnp.tanh(new)
            h = jax.nn.sigmoid(show) * jnp.tanh(c)
            return (h, c), h.astype(u.dtype)

        return take_steps(step, self.zero(streams), streams, marks, carry, unroll=UNROLL)


def _gates(u: Float[Array, "B H G K"]) -> list[Float[Array, "B H K"]]:
    """Return a token's inputs of each gate, in fp32."""
    return [u[:, :, i].astype(jnp.float32) for i in range(u.shape[2])]


def _recalled(h: Float[Array, "B H K"], weights: Float[Array, "H G K K"]) -> list[Float[Array, "B H K"]]:
    """Return what the state adds to each gate: h U of each head."""
    product = jnp.einsum("bhk,hgkj->bhgj", h, weights, precision=jax.lax.Precision.HIGHEST)
    return [product[:, :, i] for i in range(weights.shape[1])]


def _remembers(key: Array, shape: Any, dtype: Any = jnp.float32) -> Float[Array, "H 4 K"]:
    """Draw biases of i, f, g, o: 1 for the forget gate, so that gradients pass from the start."""
    return jnp.zeros(shape, dtype).at[:, 1].set(1)


def _projected(config: _CellConfig, gates: int, dtype: Any, bias: nn.initializers.Initializer) -> Linear:
    sizes = {"h": config.num_heads, "g": gates, "k": config.width}
    return Linear("btd,dhgk->bthgk", sizes, ("embed", "heads", None, "head_dim"), dtype, bias=bias, name="in")


def _recurrent(module: GRU | LSTM, gates: int) -> Float[Array, "H G K K"]:
    config = module.config
    init = per_block(nn.initializers.orthogonal(), 2)
    shape = (config.num_heads, gates, config.width, config.width)
    return module.param("recurrent", named(init, "heads", None, "head_dim", None), shape, jnp.float32)


def _output(config: _CellConfig, dtype: Any) -> Linear:
    return Linear("bthk,hkd->btd", {"d": config.dim}, ("heads", "head_dim", "embed"), dtype, name="out")
