"""The taps of an implicit filter: a small network over the lag, and what each channel makes of it."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.layers import Linear, named
from jaxblt.mixers.hyena.filters import ImplicitFilter

SPAN = 1 << 14
"""Lags of a span. The weights' gradient is a sum over lags: a product a span, and not one that is small and deep."""


class ImplicitTaps(nn.Module):
    """Taps as a function of the lag, [sides, D, L]; see `ImplicitFilter` for the formula."""

    filter: ImplicitFilter
    dim: int
    sides: int

    def __call__(self, length: int) -> Float[Array, "S D L"]:
        """Return the first `length` taps of each side."""
        return evaluate(self.filter, *self.parts(length))

    @nn.compact
    def parts(self, length: int) -> tuple[Float[Array, "L W"], tuple[Array, Array]]:
        """Return the hidden layer at each lag, and by channel its weights and decay.

        The weights are [D, sides, W], the window's decay is [D].
        """
        filter = self.filter
        frequency = self.param(
            "frequency",
            named(nn.initializers.constant(filter.sine_freq), None),
            (filter.width,),
            jnp.float32,
        )
        hidden = self._lag_features(length)
        for i in range(filter.inner_layers + 1):
            hidden = jnp.sin(frequency[None] * self._layer(filter.width, i)(hidden))
        weights = _Weights((filter.width, self.sides, self.dim), name="out")()
        decay = jnp.linspace(*filter.decay_range(), self.dim, dtype=jnp.float32)
        return hidden, (jnp.transpose(weights, (2, 1, 0)), decay)

    def _lag_features(self, length: int) -> Float[Array, "L F"]:
        filter = self.filter
        if not filter.learned_features:
            return _features(_lags(filter, length), filter.emb_dim)

        def begin(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
            return _features(_lags(filter, shape[0]), shape[1]).astype(dtype)

        shape = (filter.filter_len, filter.emb_dim)
        return self.param("features", named(begin, None, None), shape, jnp.float32)[:length]

    def _layer(self, features: int, index: int) -> Linear:
        return Linear(
            "lf,fw->lw",
            {"w": features},
            (None, None),
            bias=nn.initializers.zeros,
            kernel_init=_uniform,
            precision=jax.lax.Precision.HIGHEST,
            name=f"layer_{index}",
        )


class _Weights(nn.Module):
    """The kernel of the last layer, by itself: some channels may be evaluated without the others."""

    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self) -> Float[Array, "W S D"]:
        return self.param("kernel", named(_flat, None, None, "channels"), self.shape, jnp.float32)


def evaluate(
    filter: ImplicitFilter, hidden: Float[Array, "L W"], by_channel: tuple[Array, Array]
) -> Float[Array, "S D L"]:
    """Return the taps of the channels in `by_channel`: `ImplicitTaps.parts` or a slice of it."""
    weights, decay = by_channel
    length, width = hidden.shape
    span = max(min(length, SPAN), 1)
    spans = jnp.pad(hidden, ((0, -length % span), (0, 0))).reshape(-1, span, width)
    weights = jnp.broadcast_to(weights, (len(spans), *weights.shape))
    out = jnp.einsum("nlw,ndsw->sdnl", spans, weights, precision=jax.lax.Precision.HIGHEST)
    out = out.reshape(*out.shape[:2], -1)[..., :length]
    window = jnp.exp(-decay[:, None] * _lags(filter, length)[None]) + filter.shift
    if filter.unit_energy:
        window = jnp.sqrt(2 * decay / filter.normaliser)[:, None] * window
    return out * window[None]


def _lags(filter: ImplicitFilter, length: int) -> Float[Array, "L"]:
    return jnp.arange(length, dtype=jnp.float32) / jnp.float32(filter.normaliser)


def _features(t: Float[Array, "L"], emb_dim: int) -> Float[Array, "L F"]:
    bands = jnp.arange(1, (emb_dim - 1) // 2 + 1, dtype=jnp.float32)
    angle = jnp.float32(2 * jnp.pi) * jnp.mod(t[:, None] * bands[None], 1.0)
    return jnp.concatenate([t[:, None], jnp.cos(angle), -jnp.sin(angle)], axis=-1)


_uniform = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _flat(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw from `_uniform` with the first axis as the only inputs."""
    return _uniform(key, (shape[0], math.prod(shape[1:])), dtype).reshape(shape)
