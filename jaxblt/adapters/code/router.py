"""The router: from what a stack or a block reads to the code that scales the ranks of its adapters, causally."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.adapters.code.experimental.mixed import Mixed, level_weights, sow_shares
from jaxblt.adapters.code.latest_values import LatestValues
from jaxblt.adapters.code.levels import (
    EVERY,
    Level,
    Places,
    are_aligned,
    can_change,
    edge_spacing,
    is_edge,
    is_known,
    levels_of,
    places_of,
)
from jaxblt.adapters.code.losses import sow_code_losses
from jaxblt.adapters.code.pools import ChunkState, ChunkSums
from jaxblt.adapters.code.reads import Features, Read, RouterInput
from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.models.adapter import CHOSEN
from jaxblt.models.positions import document_positions
from jaxblt.show import show
from jaxblt.side_outputs import sow_metric

ROUTER = "router"
"""The child of a stack, or of each block, that holds a router."""
SHARES = "shares"
"""What the router of a bank sows its code before the transforms as, into Flax's `intermediates`."""


@flax.struct.dataclass
class RouterState:
    """State of a router along the documents of its rows.

    Attributes:
      clock: where each row stands.
      chunks: sums over chunks.
      reads: states of the reads, by name.
      networks: what `run_network` made last, for each level except "token".
      code: states of the transforms.
      replaced: tokens so far whose code was not finite.
      level, chunk: the config's, which say what the arrays mean.
    """

    clock: Clock
    chunks: ChunkState
    reads: dict[str, Any]
    networks: dict[str, Float[Array, "B F"]]
    code: tuple[Any, ...]
    replaced: Int[Array, "B"]
    level: Level | Mixed = flax.struct.field(pytree_node=False)
    chunk: int = flax.struct.field(pytree_node=False)

    __repr__ = show


def init_router_state(config: Any, batch_size: int, dim: int) -> RouterState:
    """Return the state before the first token of rows of width `dim`, for the router of an `AdapterConfig`."""
    router = config.router
    nothing = jnp.zeros((batch_size, 1, dim + 1), jnp.float32)
    return RouterState(
        clock=start_clock(batch_size),
        chunks=ChunkSums(router.chunk, router.lag).zero((nothing,)),
        reads={read.name: read.zero(router, batch_size, dim) for read in router.reads},
        networks={
            level: jnp.zeros((batch_size, router.hidden + config.numbers), jnp.float32)
            for level in levels_of(router)
            if level != "token"
        },
        code=tuple(transform.init_state(batch_size, config.numbers) for transform in config.code),
        replaced=jnp.zeros((batch_size,), jnp.int32),
        level=router.level,
        chunk=router.chunk,
    )


@flax.struct.dataclass
class Moment:
    """Facts about the tokens of a call that transforms use.

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

    h is the norm of the input, k = t // C the chunk of the token at time t of its document, r the features of
    `RouterConfig.reads` side by side, and f = Dense(silu(Dense(.))) with a last kernel of 0:

        prefix   f(r) from the prefix's end on
        chunk    f(r), constant in the chunk, from chunk `lag` on
        token    f([h_t; r])

    Before the first code stands the fallback. f is computed once a prefix or chunk: at a place that `places_of` knows,
    or at the token where `is_edge` finds it. Calls of few tokens compute none where no row has such a token. Numbers
    are 1 + f, or softmax(f) over the blocks of a bank. `Mixed` levels have a network each; a gate between them is
    computed at each token in such calls.

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
        """Return the code, zero at holes and padding, and the state after the tokens (None without one).

        In calls with a state the fallback stands for a code that is not finite, and the state counts its tokens. Whole
        rows keep such codes: a training step has to see them. `documents` are keys of the documents whose own chunks
        are no neighbours; see `jaxblt.adapters.code.batch_documents`.

        Raises:
          ValueError: side features are missing, more or fewer than the reads take; the state is of another config; a
            read of one's own has another width than it says.
        """
        config = self.adapter.router
        check_side(config, side)
        check_state(config, state)
        rows = read(x.astype(jnp.float32), segment_ids, None, None if state is None else state.clock)
        if state is None:
            time = document_positions(jnp.zeros(x.shape[:2], jnp.int32), segment_ids)
        else:
            time = rows.arranged.time
            side = None if side is None else jnp.take_along_axis(side, rows.arranged.order[..., None], 1)
        whole = state is None and not rows.split
        aligned = are_aligned(config, segment_ids, whole=whole)
        passed = {"side": side, "documents": documents}
        beside = {name: array for name, array in passed.items() if array is not None}
        call, chunks = self._input(
            rows, time, beside, None if state is None else state.chunks, aligned=aligned
        )
        features, reads = self._hear(call, {} if state is None else state.reads)
        places: dict[Level, Places | None] = {
            level: places_of(config, level, x.shape[1], segment_ids, whole=whole)
            for level in levels_of(config)
        }
        code, moment, networks = self._code(
            features, time, rows, places, None if state is None else state.networks
        )
        states, first = [], code
        for i, transform in enumerate(self.adapter.code):
            before = None if state is None else state.code[i]
            code, left = transform.apply(
                self, f"{type(transform).__name__.lower()}_{i}", code, moment, rows, before
            )
            states.append(left)
        if self.has_variable(CHOSEN, "code"):
            row_codes, taken = (self.get_variable(CHOSEN, name) for name in ("code", "taken"))
            check_row_codes(row_codes, code)
            code = jnp.where(taken[:, None, None], row_codes[:, None], code)
        if state is None or rows.clock is None:
            self._sow(first, code, moment, time, rows.content)
            return rows.restore(code), None
        code, broken = finite_codes(code, moment.fallback, rows.content)
        self._sow(first, code, moment, time, rows.content)
        after = dataclasses.replace(
            state,
            clock=rows.clock,
            chunks=chunks,
            reads=reads,
            networks=networks,
            code=tuple(states),
            replaced=state.replaced + broken,
        )
        return rows.restore(code), after

    def _sow(
        self,
        before: Float[Array, "B T E"],
        code: Float[Array, "B T E"],
        moment: Moment,
        time: Int[Array, "B T"],
        content: Bool[Array, "B T"] | None,
    ) -> None:
        """Sow the mean code of tokens as a metric, and the losses of a code before its transforms and behind them."""
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
        features: Features,
        time: Int[Array, "B T"],
        rows: Rows,
        places: Mapping[Level, Places | None],
        networks: Mapping[str, Float[Array, "B F"]] | None,
    ) -> tuple[Float[Array, "B T E"], Moment, dict[str, Float[Array, "B F"]]]:
        """Return the code before its transforms, and what networks of levels made last."""
        config, levels = self.adapter.router, list(places)
        fallback = config.fallback * self.adapter.start
        read = {level: (place or EVERY).taken(features[level]) for level, place in places.items()}
        hidden, scores, after = [], [], {}
        for level, place in places.items():
            carry = None if networks is None else networks.get(level)
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

    def _input(
        self,
        rows: Rows,
        time: Int[Array, "B T"],
        beside: Mapping[str, Array],
        state: ChunkState | None,
        *,
        aligned: bool,
    ) -> tuple[RouterInput, ChunkState | None]:
        """Return what the reads share, and the state of the sums over chunks."""
        config = self.adapter.router
        bare, inverse_rms, scale = Unscaled(name="norm")(rows.x)
        counts = (
            jnp.ones((*time.shape, 1))
            if rows.content is None
            else rows.content[..., None].astype(jnp.float32)
        )
        core = ChunkSums(config.chunk, config.lag, aligned)
        sums, after = rows.run(core, (jnp.concatenate([bare, counts], -1), time), state)
        base_vector = sums[..., :-1] / jnp.maximum(sums[..., -1:], 1.0)
        return RouterInput(config, rows, time, bare, inverse_rms, scale, base_vector, beside, aligned), after  # pyright: ignore

    def _hear(self, call: RouterInput, states: Mapping[str, Any]) -> tuple[Features, dict[str, Any]]:
        """Return the features of each level, and the states of the reads."""
        heard, after = {}, {}
        # Hear the last read first: parameters are drawn in the order of calls, which keeps what a seed draws
        for part in reversed(call.config.reads):
            heard[part.name], after[part.name] = part.hear(self, call, states.get(part.name))
        features: dict[Level, Array] = {}
        for level in levels_of(call.config):
            parts = [call.normed] if level == "token" else []
            for part in call.config.reads:
                check_width(part, level, call, heard[part.name].get(level))
                parts += [heard[part.name][level]] if level in heard[part.name] else []
            features[level] = jnp.concatenate(parts, -1)
        return features, after

    def _network(
        self,
        level: Level,
        place: Places | None,
        x: Float[Array, "B N F"],
        time: Int[Array, "B T"],
        rows: Rows,
        carry: Float[Array, "B W"] | None,
    ) -> tuple[Float[Array, "B T W"], Float[Array, "B W"] | None]:
        """Return what `run_network` makes of x, at each token, and behind the call."""
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
        core = LatestValues(weights, run_network, hidden + numbers, size)
        return rows.run(core, (x, is_edge(self.adapter.router, level, time)), carry)

    def _layer(
        self, name: str, features: int, axes: tuple[str, str | None], *, still: bool = False
    ) -> Linear:
        zeros = nn.initializers.zeros
        init = zeros if still else nn.initializers.lecun_normal()
        return Linear("btd,de->bte", {"e": features}, axes, bias=zeros, kernel_init=init, name=name)


def run_network(weights: Any, x: Float[Array, "B N F"]) -> Float[Array, "B N W"]:
    """Return the hidden layer, and f behind it, of (kernel, bias) of both layers."""
    (kernel, bias), (last, shift) = weights
    hidden = jax.nn.silu(jnp.einsum("btd,de->bte", x, kernel) + bias[None, None])
    return jnp.concatenate([hidden, jnp.einsum("btd,de->bte", hidden, last) + shift[None, None]], -1)


def finite_codes(
    code: Float[Array, "B T E"], fallback: float, content: Bool[Array, "B T"] | None
) -> tuple[Float[Array, "B T E"], Int[Array, "B"]]:
    """Return codes with the fallback where a number is not finite, and of how many tokens of each row these are."""
    broken = ~jnp.all(jnp.isfinite(code), -1)
    told = broken if content is None else broken & content
    return jnp.where(broken[..., None], jnp.float32(fallback), code), jnp.sum(told, 1, dtype=jnp.int32)


def check_row_codes(row_codes: Float[Array, "R F"], code: Float[Array, "B T E"]) -> None:
    """Raise ValueError unless codes were chosen for each row: one row's would count for all of them."""
    own = (code.shape[0], code.shape[2])
    if row_codes.shape != own:
        raise ValueError(
            f"codes were chosen for {row_codes.shape[0]} rows of {row_codes.shape[1]} numbers, and x has {own[0]} rows "
            f"of {own[1]}: give choose_adapters an adapter for each row"
        )


def check_side(config: Any, side: Float[Array, "B T S"] | None) -> None:
    """Raise ValueError unless there are as many side features as a `RouterConfig` reads."""
    count = 0 if side is None else side.shape[-1]
    if count != config.side:
        raise ValueError(
            f"the router's reads take {config.side} side features a token, got {count}: pass side with as many, or "
            "None for 0; Side(n) takes n"
        )


def check_state(config: Any, state: RouterState | None) -> None:
    """Raise ValueError for a state that another `RouterConfig` made."""
    check_kind(RouterState, state, level=config.level, chunk=config.chunk)
    names = sorted(read.name for read in config.reads)
    if state is not None and sorted(state.reads) != names:
        raise ValueError(
            f"the state is of reads called {sorted(state.reads)}, and the config of {names}: make it by init_state of "
            "the same config"
        )


def check_width(read: Read, level: Level, call: RouterInput, features: Float[Array, "B T F"] | None) -> None:
    """Raise ValueError unless a read hands a level as many features as its `width` says."""
    width = read.width(call.config, call.bare.shape[-1], level)
    found = 0 if features is None else features.shape[-1]
    if found != width:
        raise ValueError(
            f"{read} hands level {level!r} {found} features, and its width says {width}: make both the same"
        )
