"""Attention whose logits have a bias by key: a linear function of the code that an adapter gives the key's token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.layers import named
from jaxblt.mixers.attention.attention import Attention, AttentionConfig
from jaxblt.mixers.attention.kv_cache import AttentionState, init_attention_state
from jaxblt.parallel.attention.plan import Asked

FEATURES = 8
"""Channels that heads are wider by; cuDNN takes multiples of 8."""
KEY_BIAS = "key_bias"
"""The child of an `Attention` that holds the parameters of its biases."""
BY_CODE = "by_code"
"""The parameter of a `KeyBias`."""


@dataclasses.dataclass(frozen=True)
class BiasedAttentionConfig(AttentionConfig):
    """Attention with logits q_t.k_s / sqrt(K) + b_s; an `AdapterConfig` with a `key_bias` puts it in the place of one.

    The bias travels as one more channel of each key, which the queries read with weight 1. So every kernel, exchange
    and cache computes it, and an entry of the cache holds the bias of its own token.
    """

    @property
    def asked(self) -> Asked:
        """Everything that a call's plan wants to know of the config."""
        return dataclasses.replace(super().asked, width=self.width + FEATURES, scale=self.width**-0.5)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "BiasedAttention":
        """Return the module."""
        return BiasedAttention(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> AttentionState:
        """Return an empty cache, as `AttentionConfig.init_state` does, of wider heads."""
        return init_attention_state(
            batch_size,
            num_kv_heads=self.groups,
            head_dim=self.width + FEATURES,
            capacity=capacity,
            window=self.window,
            dtype=dtype,
        )


class BiasedAttention(Attention):
    """The module of a `BiasedAttentionConfig`; it runs inside an adapter, which gives codes."""

    def _heads(
        self, products: Sequence[Float[Array, "B T _ K"]], positions: Int[Array, "#B T"]
    ) -> tuple[Float[Array, "B T H W"], Float[Array, "B T G W"], Float[Array, "B T G W"]]:
        """Return queries, keys and values, `FEATURES` wider: 1, b sqrt(K) and 0 in the first channel more."""
        q, k, v = super()._heads(products, positions)
        bias = KeyBias(self.config.groups, name=KEY_BIAS)()
        key = (bias * jnp.float32(self.config.width**0.5)).astype(k.dtype)
        return _widened(q, jnp.ones(q.shape[:3], q.dtype)), _widened(k, key), _widened(v, jnp.zeros_like(key))

    def _out(self, o: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        return super()._out(o[..., : self.config.width])


def _widened(x: Float[Array, "B T N K"], channel: Float[Array, "B T N"]) -> Float[Array, "B T N W"]:
    """Return x with a channel and zeros behind its own."""
    return jnp.concatenate([x, jnp.pad(channel[..., None], ((0, 0),) * 3 + ((0, FEATURES - 1),))], -1)


class KeyBias(nn.Module):
    """Biases b = c W of each head of keys, with W [E, G] that starts at 0; fp32.

    The call has no argument: the adapter intercepts it and passes the code.
    """

    groups: int

    @nn.compact
    def __call__(self, code: Float[Array, "B T E"] | None = None) -> Float[Array, "B T G"]:
        assert code is not None, "BiasedAttention runs inside an adapter with a router"
        shape = code.shape[-1], self.groups
        weights = self.param(BY_CODE, named(nn.initializers.zeros, "rank", "kv_heads"), shape, jnp.float32)
        return jnp.einsum("bte,eg->btg", code, weights, precision="highest")
