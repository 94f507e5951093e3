"""Hyena: gated long convolutions as a sequence mixer."""

import dataclasses
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Tokens, arrange, named, restore, start_clock
from jaxblt.mixers.conv_state import HyenaState, empty_history, op_segments, push_history, with_history
from jaxblt.mixers.filters import Filter, ModalFilter, history_size
from jaxblt.mixers.finite_filter import FiniteConv
from jaxblt.mixers.modal_filter import ModalConv
from jaxblt.mixers.prefill import splits_call
from jaxblt.mixers.split_history import after_history
from jaxblt.mixers.streams import from_outside, over_streams
from jaxblt.parallel.halo import splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels.short_conv import short_conv

MOST_ORDER = 64


@dataclasses.dataclass(frozen=True)
class HyenaConfig:
    """Hyena operator of order N (Poli et al., 2302.10866, def. 3.1).

    Attributes:
      dim: width D.
      order: N >= 2; N - 1 long convolutions, N + 1 projections.
      short_taps: taps of the short convolution over each projection (on either side if not causal).
      filter: of the long convolutions; modal for long contexts.
      causal: a token sees itself and what came before; otherwise its whole document.
      packed: rows may hold several documents. False promises one a row (holes and tail padding allowed): then
        the convolutions need no resets.
      segment_alignment: promised by the packer: documents start at multiples of it. A multiple of the
        convolutions' chunk (128) keeps the fast path.
      implementation: of the long convolution's op; None for the fastest that runs.
    """

    dim: int
    order: int = 2
    short_taps: int = 3
    filter: Filter = ModalFilter()
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1
    implementation: Literal["reference", "xla", "mosaic_gpu"] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "short_taps", "segment_alignment", least=1)
        check_bounds(self, "order", least=2)
        check_bounds(self, "order", most=MOST_ORDER)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Hyena":
        """The module; parameters are fp32, computation in `dtype`, filters, FFTs and modal states in fp32."""
        return Hyena(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> HyenaState:
        """Zero inputs and modal states.

        Raises:
          ValueError: an implicit or explicit filter would keep more than 32K inputs.
        """
        count, filter = self.order - 1, self.filter
        if isinstance(filter, ModalFilter):
            limit = None
            filters = [jnp.zeros((batch_size, self.dim, filter.modes), jnp.float32) for _ in range(count)]
        else:
            limit = capacity if capacity < filter.taps else None
            size = history_size(filter, capacity)
            filters = [empty_history(batch_size, self.dim, size, dtype) for _ in range(count)]
        return HyenaState(
            clock=start_clock(batch_size),
            short=empty_history(batch_size, (self.order + 1) * self.dim, self.short_taps - 1, dtype),
            filters=tuple(filters),
            capacity=limit,
        )


class Hyena(nn.Module):
    """v, x_1, ..., x_N = short_conv(x W_in); v <- h_i * (x_i v) + b_i (x_i v) for i < N; y = (x_N v) W_out.

    Arrays between the projections are channel-major, [B, D, T]. Projections have no bias, and all of them are
    zero at holes and padding, which therefore add nothing to any convolution.
    """

    config: HyenaConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        config = self.config
        dim, streams = config.dim, config.order + 1
        lecun, taps = nn.initializers.lecun_normal(), nn.initializers.normal(config.short_taps**-0.5)
        self.w_in = self.param(
            "in",
            named(lecun, "embed", "channels"),
            (dim, streams * dim),
            jnp.float32,
        )
        self.w_out = self.param("out", named(lecun, "channels", "embed"), (dim, dim))
        sides = 1 if config.causal else 2
        self.short = self.param(
            "short",
            named(taps, None, "channels", "taps"),
            (sides, streams * dim, config.short_taps),
        )
        self.long = [self._long_conv() for _ in range(config.order - 1)]

    def _long_conv(self) -> ModalConv | FiniteConv:
        config = self.config
        options = (config.dim, config.causal, config.segment_alignment, config.implementation)
        if isinstance(config.filter, ModalFilter):
            return ModalConv(config.filter, *options)
        return FiniteConv(config.filter, *options)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: HyenaState | None = None,
    ) -> tuple[Float[Array, "B T D"], HyenaState | None]:
        """Output and the state after the tokens (None in training). Positions play no part."""
        x = x.astype(self.dtype)
        if state is None:
            return self._project_out(self._parallel(x, segment_ids)), None
        split = splits_call(x.shape[1])
        tokens, clock = arrange(x, segment_ids, positions, state.clock, split=split)
        y, state = self._prefill(tokens, state) if split else self._stream(tokens, state)
        return restore(self._project_out(y), tokens), dataclasses.replace(state, clock=clock)

    def _parallel(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B D T"]:
        if segment_ids is None or self.config.packed:
            v, *gates = self._split(over_streams(self._short, self._project_in(x), segment_ids, self.short))
        else:
            # with one document a row the ops need no segments, so what they would do for holes is done here
            content, segment_ids = (segment_ids > 0).astype(self.dtype), None
            z = self._project_in(x * content[..., None])
            v, *gates = self._split(over_streams(self._short, z, None, self.short) * content[:, None])
        for i, conv in enumerate(self.long):
            v = conv(v, gates[i], self._post_gate(gates, i), segment_ids)
        return v

    def _stream(self, tokens: Tokens, state: HyenaState) -> tuple[Float[Array, "B D T"], HyenaState]:
        z, short = over_batch(
            self._short_stream, (self._project_in(tokens.x), tokens, state.short), self.short
        )
        v, *gates = self._split(z)
        filters = []
        for i, conv in enumerate(self.long):
            v, after = conv.stream(v, gates[i], self._post_gate(gates, i), tokens, state.filters[i])
            filters.append(after)
        return v, dataclasses.replace(state, short=short, filters=tuple(filters))

    def _prefill(self, tokens: Tokens, state: HyenaState) -> tuple[Float[Array, "B D T"], HyenaState]:
        """`_stream` for tokens that a mesh splits along the sequence."""
        z = self._project_in(tokens.x)
        y = over_streams(self._short, z, op_segments(tokens), self.short)
        z, short = after_history(short_conv, y, z, tokens, state.short, self.short[0])
        v, *gates = self._split(z)
        filters = []
        for i, conv in enumerate(self.long):
            v, after = conv.prefill(v, gates[i], self._post_gate(gates, i), tokens, state.filters[i])
            filters.append(after)
        return v, dataclasses.replace(state, short=short, filters=tuple(filters))

    def _short(self, z: Any, ids: Any, taps: Float[Array, "S E K"]) -> Float[Array, "B E T"]:
        """The short convolution; if not causal, another one over the reversed row is added."""
        y = short_conv(z, taps[0], segment_ids=ids)
        if not self.config.causal:
            back, back_ids = jax.tree.map(lambda a: jnp.flip(a, -1), (z, ids))
            y = y + jnp.flip(short_conv(back, taps[1], segment_ids=back_ids), -1)
        if splits_sequence():
            for side in range(len(taps)):
                conv = partial(short_conv, taps=taps[side])
                y = y + from_outside(conv, z, ids, self.config.short_taps - 1, reverse=side == 1)
        return y

    def _short_stream(self, batched: Any, taps: Float[Array, "S E K"]) -> Any:
        z, tokens, history = batched
        joined, ids = with_history(history, z, tokens)
        y = short_conv(joined, taps[0], segment_ids=ids)[..., history.shape[-1] :]
        return y, push_history(history, z, tokens)

    def _project_in(self, x: Float[Array, "B T D"]) -> Float[Array, "B E T"]:
        return jnp.einsum("btd,de->bet", x, self.w_in.astype(self.dtype))

    def _project_out(self, y: Float[Array, "B D T"]) -> Float[Array, "B T D"]:
        return jnp.einsum("bct,cd->btd", y.astype(self.dtype), self.w_out.astype(self.dtype))

    def _split(self, z: Float[Array, "B E T"]) -> list[Float[Array, "B D T"]]:
        return jnp.split(z, self.config.order + 1, axis=1)

    def _post_gate(self, gates: list[Float[Array, "B D T"]], i: int) -> Float[Array, "B D T"] | None:
        """x_N for the last convolution, fused into its op."""
        return gates[-1] if i == len(self.long) - 1 else None
