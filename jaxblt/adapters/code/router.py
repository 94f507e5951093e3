"""The router: from what a stack or a block reads to the code that scales the ranks of its adapters, causally."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.hold import Held
from jaxblt.adapters.code.levels import (
    EVERY,
    Level,
    Mixed,
    Places,
    are_aligned,
    can_change,
    edge_spacing,
    is_edge,
    is_known,
    level_weights,
    levels_of,
    places_of,
    sow_shares,
)
from jaxblt.adapters.code.losses import sow_code_losses
from jaxblt.adapters.code.pools import Pools, Smooth, Sums
from jaxblt.adapters.code.recurrent_memory import memory_shape, remember
from jaxblt.adapters.code.traces import init_traces, trace
from jaxblt.adapters.retrieval.features import FEATURES
from jaxblt.adapters.retrieval.neighbours import retrieve
from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock, blank, start_clock
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.positions import document_positions
from jaxblt.show import show
from jaxblt.side_outputs import sow_metric

ROUTER = "router"
"""The child of a stack, or of each block, that holds a router."""
SHARES = "shares"
"""What the router of a bank sows its code before the transforms as, into Flax's `intermediates`."""
MOST_SCORE = 10.0
"""Bound of the scores of attention pooling: their exponentials are added up without a running maximum."""


@flax.struct.dataclass
class RouterState:
    """Where each row stands, the sums of its document so far, and the states of the transforms.

    `replaced` counts the tokens so far whose code was not finite. `memory` is the GRU's, [B, H, K], or the traces', a
    `TraceState`; `side` the side features that the open chunk began with, `neighbours` those of an index; None for a
    router without. `held` is what `run_network` made last for each level but "token". `level`, `chunk` and `prefix` are
    the config's, over which `sums` ran.
    """

    clock: Clock
    sums: Sums
    code: tuple[Any, ...]
    replaced: Int[Array, "B"]
    held: dict[str, Float[Array, "B F"]]
    level: Level | Mixed = flax.struct.field(pytree_node=False)
    chunk: int = flax.struct.field(pytree_node=False)
    prefix: int | None = flax.struct.field(pytree_node=False)
    memory: Any = None
    side: Float[Array, "B S"] | None = None
    neighbours: Float[Array, "B F"] | None = None

    __repr__ = show


def init_router_state(config: Any, batch_size: int, dim: int) -> RouterState:
    """The state before the first token of rows of width `dim`, for the router of an `AdapterConfig`."""
    nothing, router = jnp.zeros((batch_size, 1, dim), jnp.float32), config.router
    memory = None
    if router.memory == "traces":
        memory = init_traces(router.hidden, batch_size)
    elif router.memory:
        memory = jnp.zeros((batch_size, *memory_shape(router)), jnp.float32)
    return RouterState(
        clock=start_clock(batch_size),
        sums=_pools(router).zero((nothing,)),
        code=tuple(transform.init_state(batch_size, config.numbers) for transform in config.code),
        replaced=jnp.zeros((batch_size,), jnp.int32),
        held={
            level: jnp.zeros((batch_size, router.hidden + config.numbers), jnp.float32)
            for level in levels_of(router)
            if level != "token"
        },
        level=router.level,
        chunk=router.chunk,
        prefix=router.prefix,
        memory=memory,
        side=jnp.zeros((batch_size, router.side), jnp.float32) if router.side else None,
        neighbours=jnp.zeros((batch_size, len(FEATURES)), jnp.float32) if router.retrieval else None,
    )


@flax.struct.dataclass
class Moment:
    """What transforms are told of the tokens of a call.

    Attributes:
      known: where the router gives a code; elsewhere stands the fallback.
      changes: where a token may have another code than the one before it.
      hidden: the router's hidden layer, zero where its level has no code.
      fallback: the number of every block before the first code.
    """

    known: Bool[Array, "B T"]
    changes: Bool[Array, "B T"]
    hidden: Float[Array, "B T H"]
    fallback: float = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Heard:
    """What there is to read at each token: h, m, s and side features, the last two None for a router without.

    `chunk_memory` and `chunk_side` are those that the token's chunk reads, `neighbours` those of an index. `prefix` is
    p. They are None for a router without.
    """

    h: Float[Array, "B T D"]
    mean: Float[Array, "B T D"]
    memory: Float[Array, "B T F"] | None
    chunk_memory: Float[Array, "B T F"] | None
    side: Float[Array, "B T S"] | None
    chunk_side: Float[Array, "B T S"] | None
    neighbours: Float[Array, "B T F"] | None
    prefix: Float[Array, "B T D"] | None


class Unscaled(nn.Module):
    """x / r in fp32 with r = sqrt(mean(x^2) + eps), 1 / r, and the scale of an `RMSNorm` of the same parameters.

    The scale is one for all tokens, so means may be taken without it, and be of the base alone.
    """

    epsilon: float = 1e-6

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T 1"], Float[Array, "1 1 D"]]:
        scale = self.param("scale", named(nn.initializers.ones, "norm"), (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        square = jnp.mean(wide * wide, -1, keepdims=True)
        root = jax.lax.rsqrt(square + self.epsilon)
        return wide * root, root, scale[None, None]


class Router(nn.Module):
    """A code for each token from what came before it: [B, T, D] -> [B, T, E], one number a block of ranks; fp32.

    h is the norm of the input, k = t // C the chunk of the token at time t of its document, m_k the mean of h over
    chunk k, p attention pooling of the first P steps, f = Dense(silu(Dense(.))) with a last kernel of 0:

        prefix   f(p) from step P on
        chunk    f([m_{k - lag}; s; e; r; p]), constant in the chunk, from chunk `lag` on
        token    f([h_t; m_{k - lag}; s; e; r; p])

    An m or p that is not complete is zero. With a memory s is a GRU over the means up to m_{k - lag}, or traces up to
    the token, or up to the chunk's first token; see `code.traces`. With side features e are those of the
    token, or of the chunk's first token, and zero if that is a hole. With an index r are features of the neighbours of
    m_{k - lag}, taken without the norm's scale; see `jaxblt.adapters.retrieval`. Before the first code stands the
    fallback. f is computed once a prefix or chunk: at a place that `places_of` knows, or at the token where `is_edge`
    finds it. Calls of few tokens compute none where no row has such a token. Numbers are 1 + f, or softmax(f) over the
    blocks of a bank. `Mixed` levels have a network each; a gate between them is computed at each token in such calls.

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
        side: Float[Array, "B T S"] | None = None,
        documents: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T E"], RouterState | None]:
        """The code, zero at holes and padding, and the state after the tokens (None without one).

        In calls with a state the fallback stands for a code that is not finite, and the state counts its tokens. Whole
        rows keep such codes: a training step has to see them. `documents` are keys of the documents whose own chunks
        are no neighbours; see `jaxblt.adapters.code.batch_documents`.

        Raises:
          ValueError: side features are missing, more or fewer than `RouterConfig.side`; the state is of another config.
        """
        config = self.adapter.router
        check_side(config, side)
        check_kind(RouterState, state, level=config.level, chunk=config.chunk, prefix=config.prefix)
        rows = read(x.astype(jnp.float32), segment_ids, None, None if state is None else state.clock)
        if state is None:
            time = document_positions(jnp.zeros(x.shape[:2], jnp.int32), segment_ids)
        else:
            time = rows.arranged.time
            side = None if side is None else jnp.take_along_axis(side, rows.arranged.order[..., None], 1)
        whole = state is None and not rows.split
        aligned = are_aligned(config, segment_ids, whole=whole)
        heard, after = self._hear(rows, time, side, documents, state, aligned=aligned)
        places: dict[Level, Places | None] = {
            level: places_of(config, level, x.shape[1], segment_ids, whole=whole)
            for level in levels_of(config)
        }
        code, moment, held = self._code(heard, time, rows, places, None if state is None else state.held)
        states, first = [], code
        for i, transform in enumerate(self.adapter.code):
            before = None if state is None else state.code[i]
            code, left = transform.apply(
                self, f"{type(transform).__name__.lower()}_{i}", code, moment, rows, before
            )
            states.append(left)
        if self.has_variable(CHOSEN, "code"):
            chosen, taken = (self.get_variable(CHOSEN, name) for name in ("code", "taken"))
            check_chosen(chosen, code)
            code = jnp.where(taken[:, None, None], chosen[:, None], code)
        if after is not None:
            code, broken = finite_codes(code, moment.fallback, rows.content)
            after = dataclasses.replace(after, replaced=after.replaced + broken)  # pyright: ignore[reportArgumentType]
        self._sow(first, code, moment, time, rows.content)
        code = rows.restore(code)
        if rows.clock is None or after is None:
            return code, None
        return code, after.replace(clock=rows.clock, code=tuple(states), held=held)  # pyright: ignore[reportAttributeAccessIssue]

    def _sow(
        self,
        before: Float[Array, "B T E"],
        code: Float[Array, "B T E"],
        moment: Moment,
        time: Int[Array, "B T"],
        content: Bool[Array, "B T"] | None,
    ) -> None:
        """The mean code of tokens as a metric, and the losses of a code before its transforms and behind them."""
        told = jnp.ones(time.shape, jnp.float32) if content is None else content.astype(jnp.float32)
        if self.adapter.blocks is not None:
            self.sow("intermediates", SHARES, before)
        sow_metric(self, "mean_code", jnp.einsum("bte,bt->e", code, told) / jnp.maximum(jnp.sum(told), 1))
        if not self.adapter.losses.of_codes:
            return
        shares = before if self.adapter.blocks is not None else jax.nn.softmax(before, -1)
        known = moment.known if content is None else moment.known & content
        sow_code_losses(self, self.adapter.losses, shares, code, known, moment.changes & (time > 0))

    def _code(
        self,
        heard: Heard,
        time: Int[Array, "B T"],
        rows: Rows,
        places: Mapping[Level, Places | None],
        held: Mapping[str, Float[Array, "B F"]] | None,
    ) -> tuple[Float[Array, "B T E"], Moment, dict[str, Float[Array, "B F"]]]:
        """The code before its transforms, and what levels hold behind the call."""
        config, levels = self.adapter.router, list(places)
        fallback = config.fallback * self.adapter.start
        read = {
            level: self._features(level, *jax.tree.map((place or EVERY).taken, (heard, time)))
            for level, place in places.items()
        }
        hidden, scores, after = [], [], {}
        for level, place in places.items():
            carry = None if held is None else held.get(level)
            both, left = self._network(level, place, read[level], time, rows, carry)
            hidden.append(both[..., : config.hidden])
            scores.append(both[..., config.hidden :])
            if left is not None:
                after[level] = left
        known = [is_known(config, level, time) for level in levels]
        numbers = (1.0 + f if self.adapter.blocks is None else jax.nn.softmax(f, -1) for f in scores)
        codes = [jnp.where(k[..., None], c, fallback) for k, c in zip(known, numbers, strict=True)]
        # Hide what no level has yet: spread over a row, a prefix's layer would tell its own tokens of later ones.
        hidden = [jnp.where(k[..., None], x, 0.0) for k, x in zip(known, hidden, strict=True)]
        code, shown, some = codes[-1], hidden[-1], known[-1]
        if isinstance(config.level, Mixed):
            gate = None
            if config.level.by == "gate":
                last = levels[-1]
                few = self._layer("gate", len(levels), ("embed", None), still=True)(read[last])
                gate = (places[last] or EVERY).spread(few, time.shape[1])
            weights = level_weights(config, scores, gate, time)
            sow_shares(self, config, weights, rows.content)
            code, shown = (jnp.einsum("btl,lbte->bte", weights, jnp.stack(x)) for x in (codes, hidden))
            some = jnp.any(jnp.stack(known, -1) & (weights > 0), -1)
        moment = Moment(some, can_change(config, time, rows.content), shown, fallback)
        return code, moment, after

    def _hear(
        self,
        rows: Rows,
        time: Int[Array, "B T"],
        side: Float[Array, "B T S"] | None,
        documents: Int[Array, "B T"] | None,
        state: Any,
        *,
        aligned: bool,
    ) -> tuple[Heard, RouterState | None]:
        """What f may read, and the state after it."""
        config, dim = self.adapter.router, rows.x.shape[-1]
        content = jnp.ones(time.shape, bool) if rows.content is None else rows.content
        bare, root, scale = Unscaled(name="norm")(rows.x)
        h = bare * scale
        counts = content[..., None].astype(jnp.float32)
        pooled = (time < (config.prefix or 0))[..., None].astype(jnp.float32) * counts
        if config.prefix is not None:
            query = self.param("query", named(nn.initializers.normal(1.0), "norm"), (dim,), jnp.float32)
            # Sum over x, not over h: XLA makes this sum and that of x^2 in one kernel
            weight = scale[0, 0] * query / jnp.float32(dim**0.5)
            score = jnp.einsum("btd,d->bt", rows.x, weight)[..., None] * root
            pooled = pooled * jnp.exp(MOST_SCORE * jnp.tanh(score / MOST_SCORE))
        given = (bare, counts, pooled, time)
        (chunk, prefix), sums = rows.run(
            _pools(config, aligned=aligned), given, None if state is None else state.sums
        )
        base = chunk[..., :-1] / jnp.maximum(chunk[..., -1:], 1.0)
        mean = base * scale
        memory = chunk_memory = memorised = chunk_side = held = near = kept = None
        before = None if state is None else state.memory
        if config.memory == "traces":
            memory, chunk_memory, memorised = trace(self, config, rows, h, time, content, before)
        elif config.memory:
            memory, memorised = remember(self, config, rows, mean, time, before)
            chunk_memory = memory
        if side is not None:
            side = blank(side.astype(jnp.float32), content)
            starts = (time % config.chunk == 0)[..., None]
            streams = jnp.where(starts, 0.0, 1.0), jnp.where(starts, side, 0.0)
            chunk_side, held = rows.run(Smooth(), streams, None if state is None else state.side)
        if config.retrieval:
            carry = None if state is None else state.neighbours
            near, kept = retrieve(config, rows, base, time, documents, carry)
        p = None
        if config.prefix is not None:
            weight = jnp.maximum(prefix[..., -1:], jnp.exp(jnp.float32(-2 * MOST_SCORE)))
            p = prefix[..., :-1] / weight * scale
        heard = Heard(h, mean, memory, chunk_memory, side, chunk_side, near, p)
        if state is None:
            return heard, None
        kept_of = {"memory": memorised, "side": held, "neighbours": kept}
        return heard, state.replace(sums=sums, code=(), **kept_of)

    def _features(self, level: Level, heard: Heard, time: Int[Array, "B T"]) -> Float[Array, "B T F"]:
        """What f of a level reads."""
        config = self.adapter.router
        parts = {
            "prefix": [],
            "chunk": [heard.mean, heard.chunk_memory, heard.chunk_side, heard.neighbours],
            "token": [heard.h, heard.mean, heard.memory, heard.side, heard.neighbours],
        }[level]
        if heard.prefix is not None:
            chunk = time // config.chunk - config.lag + 1
            complete = (chunk * config.chunk if level == "chunk" else time) >= config.prefix
            parts = [*parts, jnp.where(complete[..., None], heard.prefix, 0.0)]
        return jnp.concatenate([part for part in parts if part is not None], -1)

    def _network(
        self,
        level: Level,
        place: Places | None,
        x: Float[Array, "B N F"],
        time: Int[Array, "B T"],
        rows: Rows,
        carry: Float[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B T W"], Float[Array, "B W"] | None]:
        """What `run_network` makes of x, at each token, and behind the call."""
        hidden, numbers = self.adapter.router.hidden, self.adapter.numbers
        tail = "" if self.adapter.router.level == level else f"_{level}"
        layers = (
            self._layer(f"hidden{tail}", hidden, ("embed", "features")).weights(x),
            self._layer(f"code{tail}", numbers, ("features", "rank"), still=True).weights(
                jnp.zeros((1, 1, hidden), jnp.float32)
            ),
        )
        weights = [(layer.kernel, layer.bias) for layer in layers]
        if place is not None:
            return place.spread(run_network(weights, x), time.shape[1]), None
        size = edge_spacing(self.adapter.router, level)
        core = Held(weights, run_network, hidden + numbers, size)
        return rows.run(core, (x, is_edge(self.adapter.router, level, time)), carry)

    def _layer(
        self, name: str, features: int, axes: tuple[str, str | None], *, still: bool = False
    ) -> Linear:
        zeros = nn.initializers.zeros
        init = zeros if still else nn.initializers.lecun_normal()
        return Linear("btd,de->bte", {"e": features}, axes, bias=zeros, kernel_init=init, name=name)


def run_network(weights: Any, x: Float[Array, "B N F"]) -> Float[Array, "B N W"]:
    """The hidden layer, and f behind it, of (kernel, bias) of both layers."""
    (kernel, bias), (last, shift) = weights
    hidden = jax.nn.silu(jnp.einsum("btd,de->bte", x, kernel) + bias[None, None])
    return jnp.concatenate([hidden, jnp.einsum("btd,de->bte", hidden, last) + shift[None, None]], -1)


def finite_codes(
    code: Float[Array, "B T E"], fallback: float, content: Bool[Array, "B T"] | None
) -> tuple[Float[Array, "B T E"], Int[Array, "B"]]:
    """Codes with the fallback where a number is not finite, and of how many tokens of each row these are."""
    broken = ~jnp.all(jnp.isfinite(code), -1)
    told = broken if content is None else broken & content
    return jnp.where(broken[..., None], jnp.float32(fallback), code), jnp.sum(told, 1, dtype=jnp.int32)


def check_chosen(chosen: Float[Array, "R F"], code: Float[Array, "B T E"]) -> None:
    """Raises ValueError unless codes were chosen for each row: one row's would count for all of them."""
    own = (code.shape[0], code.shape[2])
    if chosen.shape != own:
        raise ValueError(
            f"codes were chosen for {chosen.shape[0]} rows of {chosen.shape[1]} numbers, and x has {own[0]} rows of "
            f"{own[1]}: give choose_adapters an adapter for each row"
        )


def _pools(config: Any, *, aligned: bool = False) -> Pools:
    return Pools(size=config.chunk, lag=config.lag, aligned=aligned)


def check_side(config: Any, side: Float[Array, "B T S"] | None) -> None:
    """Raises ValueError unless there are as many side features as a `RouterConfig` reads."""
    count = 0 if side is None else side.shape[-1]
    if count != config.side:
        raise ValueError(
            f"the router reads RouterConfig.side = {config.side} side features a token, got {count}: pass side with "
            "as many, or None for 0"
        )
