"""Convolution with a filter of finitely many taps: implicit or explicit parameters, parallel pass, streaming."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Tokens, named
from jaxblt.mixers.conv_state import push_history, with_history
from jaxblt.mixers.filters import ExplicitFilter, FiniteFilter, ImplicitFilter
from jaxblt.parallel.islands import over_batch
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.long_conv import long_conv

MAX_BLOCKED = 512
"""Taps up to which Toeplitz blocks are faster than an FFT."""


class ImplicitTaps(nn.Module):
    """Taps as a function of the lag, [sides, D, L]; see `ImplicitFilter` for the formula."""

    filter: ImplicitFilter
    dim: int
    sides: int

    @nn.compact
    def __call__(self, length: int) -> Float[Array, "S D L"]:
        filter = self.filter
        t = jnp.arange(length, dtype=jnp.float32) / jnp.float32(filter.normaliser)
        frequency = self.param(
            "frequency",
            named(nn.initializers.constant(filter.sine_freq), None),
            (filter.width,),
        )
        hidden = _features(t, filter.emb_dim)
        for i in range(filter.inner_layers + 1):
            hidden = jnp.sin(frequency[None] * self._layer(filter.width, i)(hidden))
        out = nn.DenseGeneral(
            (self.sides, self.dim),
            use_bias=False,
            kernel_init=named(_uniform(1 / 3), None, None, "channels"),
            precision=jax.lax.Precision.HIGHEST,
            name="out",
        )(hidden)
        return jnp.einsum("lsd,dl->sdl", out, self._window(t))

    def _layer(self, features: int, index: int) -> nn.Dense:
        return nn.Dense(
            features,
            kernel_init=named(_uniform(1 / 3), None, None),
            bias_init=named(nn.initializers.zeros, None),
            precision=jax.lax.Precision.HIGHEST,
            name=f"layer_{index}",
        )

    def _window(self, t: Float[Array, "L"]) -> Float[Array, "D L"]:
        slow, fast = self.filter.decay_range()
        decay = jnp.linspace(slow, fast, self.dim, dtype=jnp.float32)
        scale = jnp.sqrt(2 * decay / self.filter.normaliser)
        return scale[:, None] * jnp.exp(-decay[:, None] * t[None])


def _features(t: Float[Array, "L"], emb_dim: int) -> Float[Array, "L F"]:
    bands = jnp.arange(1, (emb_dim - 1) // 2 + 1, dtype=jnp.float32)
    angle = jnp.float32(2 * jnp.pi) * jnp.mod(t[:, None] * bands[None], 1.0)
    return jnp.concatenate([t[:, None], jnp.cos(angle), -jnp.sin(angle)], axis=-1)


def _uniform(scale: float) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(scale, "fan_in", "uniform")


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
            self.taps = self.param("taps", init, (self.dim, taps))
        normal = named(nn.initializers.normal(1.0), "channels")
        self.bias = self.param("bias", normal, (self.dim,))

    def _filter(self, length: int) -> Float[Array, "D L"]:
        """The first min(length, taps) taps of each side; not causal: [D, 2L - 1] with lag 0 in the middle."""
        length = min(length, self.filter.taps)
        if isinstance(self.filter, ExplicitFilter):
            zero = 0 if self.causal else self.filter.taps - 1
            first = 0 if self.causal else zero - length + 1
            return self.taps[:, first : zero + length]
        sides = self.implicit(length)
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

        def conv(batched: Any, shared: Any) -> Float[Array, "B D T"]:
            v, pre_gate, post_gate, segment_ids = batched
            taps, bias = shared
            return self._op(
                v,
                taps,
                bias=bias,
                pre_gate=pre_gate,
                post_gate=post_gate,
                segment_ids=segment_ids,
                segment_alignment=self.segment_alignment,
                causal=self.causal,
                implementation=self.implementation,
            )

        return over_batch(conv, (v, pre_gate, post_gate, segment_ids), (self._filter(v.shape[-1]), self.bias))

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

        shared = (self._filter(state.shape[-1] + 1), self.bias)
        y, state = over_batch(conv, (pre_gate * v, tokens, state), shared)
        return y if post_gate is None else post_gate * y, state


def _one_token(
    joined: Array, u: Array, taps: Float[Array, "D L"], bias: Float[Array, "D"]
) -> Float[Array, "B D 1"]:
    """y_t = sum_j h[j] u_{t-j} + b u_t, straight from the history."""
    y = jnp.einsum(
        "bdl,dl->bd", joined.astype(jnp.float32), jnp.flip(taps, -1), precision=jax.lax.Precision.HIGHEST
    )
    return (y[..., None] + bias[None, :, None] * u.astype(jnp.float32)).astype(u.dtype)
