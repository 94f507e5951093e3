"""Convolution with a filter of finitely many taps: implicit or explicit parameters, parallel pass, streaming."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Tokens, named
from jaxblt.mixers.conv_state import op_segments, push_history, with_history
from jaxblt.mixers.filters import FiniteFilter, ImplicitFilter
from jaxblt.mixers.implicit_taps import ImplicitTaps, evaluate
from jaxblt.mixers.split_history import after_history
from jaxblt.mixers.streams import from_outside, local_alignment, over_streams
from jaxblt.parallel.channels import over_channels
from jaxblt.parallel.halo import splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import seq_axis
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.long_conv import long_conv

MAX_BLOCKED = 512
"""Taps up to which Toeplitz blocks are faster than an FFT."""


class FiniteConv(nn.Module):
    """y = post_gate * (h * u + b u), u = pre_gate * v, with h of `filter.taps` taps (on either side if not causal)."""

    filter: FiniteFilter
    dim: int
    causal: bool = True
    segment_alignment: int = 1
    implementation: Any = None

    def setup(self) -> None:
        if isinstance(self.filter, ImplicitFilter):
            self.implicit = ImplicitTaps(self.filter, self.dim, 1 if self.causal else 2)
        else:
            taps = self.filter.taps if self.causal else 2 * self.filter.taps - 1
            init = named(nn.initializers.normal(taps**-0.5), "channels", "taps")
            self.taps = self.param("taps", init, (self.dim, taps), jnp.float32)
        normal = named(nn.initializers.normal(1.0), "channels")
        self.bias = self.param("bias", normal, (self.dim,), jnp.float32)

    def _made_of(self, length: int) -> tuple[Any, Any]:
        """What the first min(length, taps) taps of each side are made of: shared by all channels, and by channel."""
        length = min(length, self.filter.taps)
        if isinstance(self.filter, ImplicitFilter):
            return self.implicit.parts(length)
        zero = 0 if self.causal else self.filter.taps - 1
        first = 0 if self.causal else zero - length + 1
        return (), self.taps[:, first : zero + length]

    def _made(self, shared: Any, per_channel: Any) -> Float[Array, "D L"]:
        """The taps; not causal: [D, 2L - 1] with lag 0 in the middle."""
        if not isinstance(self.filter, ImplicitFilter):
            return per_channel
        sides = evaluate(self.filter, shared, per_channel)
        if self.causal:
            return sides[0]
        return jnp.concatenate([jnp.flip(sides[1, :, 1:], -1), sides[0]], axis=-1)

    def __call__(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B D T"]:
        """The parallel pass; inputs are zero at holes and padding."""
        return self._parallel((v, pre_gate, post_gate), segment_ids, self.segment_alignment)

    def _parallel(self, streams: Any, segment_ids: Any, alignment: int) -> Float[Array, "B D T"]:
        v, pre_gate, post_gate = streams
        shared, per_channel = self._made_of(v.shape[-1])
        if seq_axis() is not None and self._op is long_conv:
            channels = partial(self._channels, alignment=alignment)
            y = over_channels(channels, pre_gate * v, (per_channel, self.bias), shared, segment_ids)
            return y if post_gate is None else post_gate * y
        filter = (self._made(shared, per_channel), self.bias)
        return over_streams(partial(self._stretch, alignment=alignment), streams, segment_ids, filter)

    def _channels(
        self, u: Any, per_channel: Any, shared: Any, segment_ids: Any, *, alignment: int
    ) -> Float[Array, "B d T"]:
        """Whole rows of some channels, whose taps are made here."""
        made_of, bias = per_channel
        return self._rows(u, (self._made(shared, made_of), bias), segment_ids, alignment=alignment)

    def _rows(
        self, u: Any, filter: Any, segment_ids: Any, *, alignment: int, **gates: Any
    ) -> Float[Array, "B D T"]:
        taps, bias = filter
        return self._op(
            u,
            taps,
            bias=bias,
            segment_ids=segment_ids,
            segment_alignment=alignment,
            causal=self.causal,
            implementation=self.implementation,
            **gates,
        )

    def _stretch(
        self, streams: Any, segment_ids: Any, filter: Any, *, alignment: int
    ) -> Float[Array, "B D T"]:
        """A device's own steps, and what its neighbours' inputs add to them."""
        v, pre_gate, post_gate = streams
        alignment = local_alignment(alignment, v.shape[-1])
        y = self._rows(v, filter, segment_ids, alignment=alignment, pre_gate=pre_gate, post_gate=post_gate)
        if not splits_sequence():
            return y
        taps, centre = filter[0], 0 if self.causal else filter[0].shape[1] // 2
        added = self._from_outside(pre_gate * v, segment_ids, taps[:, centre:])
        if not self.causal:
            added += self._from_outside(pre_gate * v, segment_ids, taps[:, centre::-1], reverse=True)
        return y + (added if post_gate is None else post_gate * added)

    def _from_outside(self, u: Array, segment_ids: Any, taps: Array, *, reverse: bool = False) -> Array:
        conv = partial(self._op, filter=taps, implementation=self.implementation)
        return from_outside(conv, u, segment_ids, taps.shape[1] - 1, reverse=reverse)

    @property
    def _op(self) -> Any:
        return blocked_conv if self.filter.taps <= MAX_BLOCKED else long_conv

    def stream(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        tokens: Tokens,
        state: Float[Array, "B D S"],
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D S"]]:
        """Outputs of the call's tokens, and the inputs that later ones need."""

        def conv(batched: Any, shared: Any) -> Any:
            u, tokens, history = batched
            joined, ids = with_history(history, u, tokens)
            new = u.shape[-1]
            if new == 1:
                y = _one_token(joined, u, *shared)
            else:
                taps, bias = shared
                y = self._op(joined, taps, bias=bias, segment_ids=ids, implementation=self.implementation)[
                    ..., -new:
                ]
            return y, push_history(history, u, tokens)

        shared = (self._made(*self._made_of(state.shape[-1] + 1)), self.bias)
        y, state = over_batch(conv, (pre_gate * v, tokens, state), shared)
        return y if post_gate is None else post_gate * y, state

    def prefill(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        tokens: Tokens,
        state: Float[Array, "B D S"],
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D S"]]:
        """`stream` for tokens that a mesh splits along the sequence: the parallel pass, and what the state adds."""
        y = self._parallel((v, pre_gate, None), op_segments(tokens), 1)
        taps = self._made(*self._made_of(state.shape[-1] + 1))
        conv = lambda u, taps: self._op(u, taps, implementation=self.implementation)  # noqa: E731
        y, state = after_history(conv, y, pre_gate * v, tokens, state, taps)
        return y if post_gate is None else post_gate * y, state


def _one_token(
    joined: Array, u: Array, taps: Float[Array, "D L"], bias: Float[Array, "D"]
) -> Float[Array, "B D 1"]:
    """y_t = sum_j h[j] u_{t-j} + b u_t, straight from the history."""
    y = jnp.einsum(
        "bdl,dl->bd", joined.astype(jnp.float32), jnp.flip(taps, -1), precision=jax.lax.Precision.HIGHEST
    )
    return (y[..., None] + bias[None, :, None] * u.astype(jnp.float32)).astype(u.dtype)
