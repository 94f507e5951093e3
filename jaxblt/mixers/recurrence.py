"""A gated linear recurrence: the smallest mixer with a state of constant size."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.mixers.base import Clock, arrange, named, restore, start_clock
from jaxblt.mixers.prefill import splits_call
from jaxblt.parallel.carry import fold_before, from_last
from jaxblt.parallel.halo import before, behind, by_stretch, splits_sequence
from jaxblt.parallel.sequence import SEQ_AXIS, over_sequence
from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class GatedRecurrenceConfig:
    """h_t = a_t h_{t-1} + (1 - a_t) u_t with a_t = sigmoid(x_t W_a + b), a diagonal gated recurrence
    (1709.04057).

    Attributes:
      dim: width D.
      causal: True; the recurrence has no bidirectional form.
    """

    dim: int
    causal: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", least=1)
        if not self.causal:
            raise ValueError(
                "the gated recurrence runs forward only: use Hyena or attention when causal=False"
            )

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "GatedRecurrence":
        """The module; parameters are fp32, projections in `dtype`, the recurrence in fp32."""
        return GatedRecurrence(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "RecurrenceState":
        """h = 0, in fp32."""
        return RecurrenceState(
            clock=start_clock(batch_size), h=jnp.zeros((batch_size, self.dim), jnp.float32)
        )


@flax.struct.dataclass
class RecurrenceState:
    """Where each row stands, and h after its last token."""

    clock: Clock
    h: Float[Array, "B D"]


class GatedRecurrence(nn.Module):
    """y = h W_out. Gates depend on the input alone, so the recurrence is linear: a scan of depth log T."""

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
        """Output and the state after the tokens (None in training). Positions play no part."""
        x = x.astype(self.dtype)
        into = self._dense("in", ("embed", "channels"))
        gate = self._dense("gate", ("embed", "channels"), bias=True)
        out = self._dense("out", ("channels", "embed"))
        if state is None:
            h = by_stretch(_train, (gate(x), into(x), segment_ids))
            return out(h.astype(self.dtype)), None
        split = splits_call(x.shape[1])
        tokens, clock = arrange(x, segment_ids, positions, state.clock, split=split)
        past = jnp.concatenate([jnp.zeros_like(tokens.run[:, :1]), tokens.run[:, :-1]], 1)
        new = tokens.live & (tokens.run != past)
        streams = (gate(tokens.x), into(tokens.x), tokens.content, new)
        if split:
            h, last = over_sequence(_prefill, streams, state.h, outputs=(True, False))
        else:
            h = _recur(*streams, state.h)
            last = h[:, -1]
        return restore(out(h.astype(self.dtype)), tokens), RecurrenceState(clock=clock, h=last)

    def _dense(self, name: str, axes: tuple[str, str], *, bias: bool = False) -> nn.Dense:
        return nn.Dense(
            self.config.dim,
            use_bias=bias,
            dtype=self.dtype,
            kernel_init=named(nn.initializers.lecun_normal(), *axes),
            bias_init=named(nn.initializers.constant(2.0), axes[1]),
            name=name,
        )


def _train(streams: Any) -> Float[Array, "B T D"]:
    """h of each document from zero, itself zero where there is no token."""
    gate, u, segment_ids = streams
    if segment_ids is None:
        everywhere = jnp.ones(u.shape[:2], bool)
        return _recur(gate, u, everywhere, ~everywhere)
    document, content = jnp.abs(segment_ids), segment_ids > 0
    past = before(document, 1, axis=1) if splits_sequence() else document[:, :1]
    new = document != jnp.concatenate([past, document[:, :-1]], 1)
    h = _recur(gate, u, content, new)
    return h * content[..., None].astype(h.dtype)


def _prefill(streams: Any, state: Float[Array, "B D"], _: Any) -> tuple[Array, Array]:
    """h of a device's stretch, and after the whole row."""
    enters = jnp.where(jax.lax.axis_index(SEQ_AXIS) == 0, state, jnp.zeros((), state.dtype))
    gate, u, content, new = streams
    h = _recur(gate, u, content, new, enters)
    return h, from_last(h[:, -1])


def _recur(
    gate: Float[Array, "B T D"],
    u: Float[Array, "B T D"],
    content: Bool[Array, "B T"],
    new: Bool[Array, "B T"],
    initial: Float[Array, "B D"] | None = None,
) -> Float[Array, "B T D"]:
    """h after each index: passed on unchanged where there is no token, from zero where a document starts."""
    a = jax.nn.sigmoid(gate.astype(jnp.float32))
    inputs = jnp.where(content[..., None], (1 - a) * u.astype(jnp.float32), 0.0)
    decay = jnp.where(content[..., None], a, 1.0) * (1.0 - new[..., None].astype(jnp.float32))
    if initial is not None:
        inputs = inputs.at[:, 0].add(decay[:, 0] * initial)

    return linear_scan(decay, inputs)


@jax.custom_vjp
def linear_scan(a: Float[Array, "B T D"], b: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """h_t = a_t h_{t-1} + b_t from h = 0, by log2 T doublings (Hillis and Steele, 1986).

    The gradient is the same recurrence backward, g_t = dh_t + a_{t+1} g_{t+1}, so none of the doublings is kept. On a
    stretch of a split sequence each device starts from 0 and adds what those before it carry in.
    """
    return _scan(a, b, reverse=False)


def _scan(a: Array, b: Array, *, reverse: bool) -> Array:
    if reverse:
        a, b = jnp.flip(a, 1), jnp.flip(b, 1)
    shift = 1
    while shift < a.shape[1]:
        a, b = a * _delay(a, shift, 1.0), a * _delay(b, shift, 0.0) + b
        shift *= 2
    if splits_sequence():
        start, summary = jnp.zeros_like(b[:, -1]), (a[:, -1], b[:, -1])
        carried = fold_before(lambda h, own: own[0] * h + own[1], start, summary, reverse=reverse)
        b = b + a * carried[:, None]
    return jnp.flip(b, 1) if reverse else b


def _delay(x: Float[Array, "B T D"], steps: int, fill: float) -> Float[Array, "B T D"]:
    return jnp.pad(x[:, :-steps], ((0, 0), (steps, 0), (0, 0)), constant_values=fill)


def _scan_fwd(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    h = linear_scan(a, b)
    return h, (a, h)


def _scan_bwd(kept: tuple[Array, Array], dh: Array) -> tuple[Array, Array]:
    a, h = kept
    edges = [jnp.zeros_like(a[:, :1])] * 2
    if splits_sequence():
        edges = [behind(a, 1, axis=1), before(h, 1, axis=1)]
    ahead, past = jnp.concatenate([a[:, 1:], edges[0]], 1), jnp.concatenate([edges[1], h[:, :-1]], 1)
    g = _scan(ahead, dh, reverse=True)
    return g * past, g


linear_scan.defvjp(_scan_fwd, _scan_bwd)
