"""The router: from what a stack reads to the code that scales the ranks of its adapters, causally."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.pools import Pools, Sums
from jaxblt.layers import Linear, RMSNorm, named
from jaxblt.mixers.base import Clock, start_clock
from jaxblt.mixers.sequence import Rows, read
from jaxblt.models.positions import document_positions

ROUTER = "router"
"""The child of a stack that holds a router."""
MOST_SCORE = 10.0
"""Bound of the scores of attention pooling: their exponentials are added up without a running maximum."""


@flax.struct.dataclass
class RouterState:
    """Where each row stands, the sums of its document so far, and the states of the transforms."""

    clock: Clock
    sums: Sums
    code: tuple[Any, ...]


def init_router_state(config: Any, batch_size: int, dim: int) -> RouterState:
    """The state before the first token of rows of width `dim`, for the router of an `AdapterConfig`."""
    nothing = jnp.zeros((batch_size, 1, dim), jnp.float32)
    return RouterState(
        clock=start_clock(batch_size),
        sums=_pools(config.router).zero((nothing,)),
        code=tuple(transform.init_state(batch_size, config.numbers) for transform in config.code),
    )


@flax.struct.dataclass
class Moment:
    """What transforms are told of the tokens of a call.

    Attributes:
      known: where the router gives a code; elsewhere stands the fallback.
      changes: where a token may have another code than the one before it.
      hidden: the router's hidden layer.
      fallback: the number of every block before the first code.
    """

    known: Bool[Array, "B T"]
    changes: Bool[Array, "B T"]
    hidden: Float[Array, "B T H"]
    fallback: float = flax.struct.field(pytree_node=False)


class Router(nn.Module):
    """A code for each token from what came before it: [B, T, D] -> [B, T, E], one number a block of ranks; fp32.

    h is the norm of the input, k = t // C the chunk of the token at time t of its document, m_k the mean of h over
    chunk k, p attention pooling of the first P steps, f = Dense(silu(Dense(.))) with a last kernel of 0:

        prefix   f(p) from step P on
        chunk    f([m_{k - lag}; p]), constant in the chunk, from chunk `lag` on
        token    f([h_t; m_{k - lag}; p])

    An m or p that is not complete is zero. Before the first code stands the fallback. Numbers are 1 + f, or softmax(f)
    over the blocks of a bank.

    Attributes:
      adapter: the `AdapterConfig`.
    """

    adapter: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: RouterState | None = None,
    ) -> tuple[Float[Array, "B T E"], RouterState | None]:
        """The code, zero at holes and padding, and the state after the tokens (None without one)."""
        rows = read(x.astype(jnp.float32), segment_ids, None, None if state is None else state.clock)
        if state is None:
            time = document_positions(jnp.zeros(x.shape[:2], jnp.int32), segment_ids)
        else:
            time = rows.arranged.time
        features, sums = self._features(rows, time, None if state is None else state.sums)
        config = self.adapter.router
        hidden = jax.nn.silu(self._dense("hidden", features, config.hidden, ("embed", "features")))
        found = self._dense("code", hidden, self.adapter.numbers, ("features", "rank"), still=True)
        code = 1.0 + found if self.adapter.blocks is None else jax.nn.softmax(found, -1)
        moment = self._moment(time, hidden, rows.content)
        code = jnp.where(moment.known[..., None], code, moment.fallback)
        after = []
        for i, transform in enumerate(self.adapter.code):
            before = None if state is None else state.code[i]
            code, left = transform.apply(
                self, f"{type(transform).__name__.lower()}_{i}", code, moment, rows, before
            )
            after.append(left)
        code = rows.restore(code)
        if rows.clock is None or sums is None:
            return code, None
        return code, RouterState(rows.clock, sums, tuple(after))

    def _features(
        self, rows: Rows, time: Int[Array, "B T"], carry: Sums | None
    ) -> tuple[Float[Array, "B T F"], Sums | None]:
        """What f reads."""
        config, dim = self.adapter.router, rows.x.shape[-1]
        content = jnp.ones(time.shape, bool) if rows.content is None else rows.content
        content = content[..., None].astype(jnp.float32)
        h = RMSNorm(name="norm")(rows.x) * content
        pooled = (time < (config.prefix or 0))[..., None].astype(jnp.float32) * content
        if config.prefix is not None:
            query = self.param("query", named(nn.initializers.normal(1.0), "norm"), (dim,), jnp.float32)
            score = jnp.einsum("btd,d->bt", h, query)[..., None] / jnp.float32(dim**0.5)
            pooled = pooled * jnp.exp(MOST_SCORE * jnp.tanh(score / MOST_SCORE))
        (chunk, prefix), sums = rows.run(_pools(config), (h, content, pooled, time), carry)
        mean = chunk[..., :-1] / jnp.maximum(chunk[..., -1:], 1.0)
        parts = {"prefix": [], "chunk": [mean], "token": [h, mean]}[config.level]
        if config.prefix is not None:
            p = prefix[..., :-1] / jnp.maximum(prefix[..., -1:], jnp.exp(jnp.float32(-2 * MOST_SCORE)))
            parts = [*parts, jnp.where((self._read_until(time) >= config.prefix)[..., None], p, 0.0)]
        return jnp.concatenate(parts, -1), sums

    def _read_until(self, time: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Steps of the document that the pooled prefix may hold at each token."""
        config = self.adapter.router
        if config.level != "chunk":
            return time
        return (time // config.chunk - config.lag + 1) * config.chunk

    def _moment(
        self, time: Int[Array, "B T"], hidden: Float[Array, "B T H"], content: Bool[Array, "B T"] | None
    ) -> Moment:
        config = self.adapter.router
        always = jnp.ones(time.shape, bool)
        known, changes = {
            "prefix": lambda: (time >= config.prefix, time == config.prefix),
            "chunk": lambda: (time // config.chunk >= config.lag, time % config.chunk == 0),
            "token": lambda: (always, always if content is None else content),
        }[config.level]()
        return Moment(known, known & changes, hidden, config.fallback * self.adapter.start)

    def _dense(
        self,
        name: str,
        x: Float[Array, "B T F"],
        features: int,
        axes: tuple[str, str],
        *,
        still: bool = False,
    ) -> Float[Array, "B T E"]:
        zeros = nn.initializers.zeros
        init = zeros if still else nn.initializers.lecun_normal()
        return Linear("btd,de->bte", {"e": features}, axes, bias=zeros, kernel_init=init, name=name)(x)


def _pools(config: Any) -> Pools:
    return Pools(size=config.chunk, lag=config.lag)
