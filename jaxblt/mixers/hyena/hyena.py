"""Hyena: gated long convolutions as a sequence mixer."""

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxblt.einsums import multiply
from jaxblt.layers import Linear, OpenSum, RMSNorm, named, stream_dtype, token_products
from jaxblt.mixers.driver.base import Clock, start_clock
from jaxblt.mixers.driver.history import ShortHistory
from jaxblt.mixers.driver.sequence import Rows, check_kind, read
from jaxblt.mixers.hyena.filters import ExplicitFilter, Filter, ImplicitFilter, ModalFilter
from jaxblt.mixers.hyena.finite_filter import (
    FilterState,
    FiniteConv,
    check_filter_state,
    finite_op,
    init_filter_state,
)
from jaxblt.mixers.hyena.modal_filter import ModalConv
from jaxblt.precision.products import fp8_by_ratio
from jaxblt.show import show
from jaxblt.validation import check_bounds, check_fields
from pallas_kernels import modal_conv
from pallas_kernels.short_conv import short_conv

MOST_ORDER = 64


@dataclasses.dataclass(frozen=True)
class HyenaConfig:
    """Hyena operator of order N (Poli et al., 2302.10866, def. 3.1).

    Attributes:
      dim: width D.
      order: N >= 2; the operator has N - 1 long convolutions and N + 1 projections.
      short_taps: taps of the short convolution over each projection (on either side if not causal).
      filter: the filter of the long convolutions; modal for long contexts.
      in_bias: add a bias to the input projections, and one per channel to the short convolution.
      out_bias: add a bias to the output projection.
      fp8_in: multiply the input projections in E4M3, with scales of each call (see `jaxblt.precision.fp8_by_ratio`),
        whatever `dtype` is. For models that were trained that way. Outputs then depend on all rows of the call.
      causal: whether a token sees only itself and earlier tokens; otherwise it sees its whole document.
      packed: whether rows may hold several documents. False promises one per row (holes and padding at the end are
        allowed), so that the convolutions need no resets.
      segment_alignment: a promise of the packer: documents start at multiples of this number. A multiple of the
        convolutions' chunk (128) keeps the fast path.
      implementation: name of an implementation of the long convolution, or None for the fastest that can run. The
        operation is `modal_conv` for a modal filter, `blocked_conv` up to 512 taps, otherwise `long_conv`. A named
        kernel that cannot run raises an error; kernels of `modal_conv` and `blocked_conv` cannot decode.
    """

    dim: int
    order: int = 2
    short_taps: int = 3
    filter: Filter = ModalFilter()
    in_bias: bool = False
    out_bias: bool = False
    fp8_in: bool = False
    causal: bool = True
    packed: bool = True
    segment_alignment: int = 1
    implementation: (
        Literal[
            "reference", "xla", "mosaic_gpu", "mosaic_gpu_vjp", "mosaic_gpu_half", "monarch", "xla_or_monarch"
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "dim", "short_taps", "segment_alignment", least=1)
        check_bounds(self, "order", least=2)
        check_bounds(self, "order", most=MOST_ORDER)
        _check_implementation(self.implementation, self.filter)
        groups = self.filter.groups if isinstance(self.filter, ExplicitFilter) else None
        if groups is not None and self.dim % groups:
            raise ValueError(
                f"filter must have groups that divide dim = {self.dim}, got {self.filter!r}: use a divisor"
            )

    @classmethod
    def upgrade(cls, stored: dict[str, Any]) -> dict[str, Any]:
        """Convert old fields: `long_conv` had a kernel without gradients of its own."""
        filter = stored.get("filter", cls.filter)
        is_finite = isinstance(filter, (ExplicitFilter, ImplicitFilter))
        is_long = is_finite and finite_op(filter)[0] == "long_conv"
        if is_long and stored.get("implementation") == "mosaic_gpu":
            return stored | {"implementation": "mosaic_gpu_vjp"}
        return stored

    @property
    def takes_norm(self) -> bool:
        """True if the module's call takes a norm, of a block that decodes a token; a subclass may build another."""
        return type(self) is HyenaConfig and not (self.in_bias or self.out_bias or self.fp8_in)

    def build(self, *, dtype: Any = jnp.float32, name: str | None = None) -> "Hyena":
        """Build the module.

        Parameters are fp32, computation in `dtype`, filters, FFTs and modal states in fp32.
        """
        return Hyena(self, dtype, name=name)

    def init_state(self, batch_size: int, *, capacity: int, dtype: Any = jnp.float32) -> "HyenaState":
        """Return zero inputs and modal states.

        Raises:
          ValueError: an implicit or explicit filter would keep more than 32K inputs.
        """
        count, filter = self.order - 1, self.filter
        if isinstance(filter, ModalFilter):
            limit = None
            filters = [jnp.zeros((batch_size, self.dim, filter.modes), jnp.float32) for _ in range(count)]
        else:
            limit = capacity if capacity < filter.taps else None
            given = {"capacity": capacity, "dtype": stream_dtype(dtype)}
            filters = [init_filter_state(filter, batch_size, self.dim, **given) for _ in range(count)]
        short = jnp.zeros((batch_size, (self.order + 1) * self.dim, self.short_taps - 1), stream_dtype(dtype))
        kind = type(filter).__name__
        return HyenaState(start_clock(batch_size), short, tuple(filters), capacity=limit, filter=kind)


def _check_implementation(name: str | None, filter: Filter) -> None:
    op, table = ("modal_conv", modal_conv.TABLE) if isinstance(filter, ModalFilter) else finite_op(filter)
    names = [entry.name for entry in table]
    if name is not None and name not in names:
        raise ValueError(
            f"implementation must be one of {names} or None with {type(filter).__name__}, which {op} runs, got {name!r}"
        )


@flax.struct.dataclass
class HyenaState:
    """State of a Hyena mixer.

    Attributes:
      clock: where each row stands.
      short: the last short_taps - 1 projected inputs of the row's document, oldest first; zero before its start.
      filters: one for each long convolution: modal states [B, D, M] in fp32, or past inputs [B, D, taps - 1]. Filters
        of more than 512 taps have the outputs to come besides.
      capacity: the most tokens of a document if an implicit filter was cut to fewer taps than it has; else None.
      filter: the kind of filter that they are of.
    """

    clock: Clock
    short: Float[Array, "B E S"]
    filters: tuple[FilterState, ...]
    capacity: int | None = flax.struct.field(pytree_node=False)
    filter: str = flax.struct.field(pytree_node=False)

    __repr__ = show


class Hyena(nn.Module):
    """v, x_1, ..., x_N = short_conv(x W_in); v <- h_i * (x_i v) + b_i (x_i v) for i < N; y = (x_N v) W_out.

    Arrays between the projections are channel-major, [B, D, T]. Projections are zero at holes and padding, which
    therefore add nothing to any convolution. In float16 all behind the first product is in fp32, the output too: gated
    sums of long filters exceed 65,504.
    """

    config: HyenaConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | OpenSum,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        state: HyenaState | None = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Float[Array, "B T D"] | OpenSum, HyenaState | None]:
        """Return the output and the next state (None in training); positions play no part.

        With a norm the output is x + hyena(norm(x)) of one token, zero if it is no content: see `token_products`.
        """
        token: Any = x
        x = x.x if isinstance(x, OpenSum) else x
        config, wide = self.config, stream_dtype(self.dtype)
        width = {"e": (config.order + 1) * config.dim}
        bias = nn.initializers.zeros if config.in_bias else None
        product = fp8_by_ratio if config.fp8_in else multiply
        options: dict[str, Any] = {"bias": bias, "product": product, "name": "in"}
        project_in = Linear("btd,de->bet", width, ("embed", "channels"), self.dtype, **options)
        sizes, names = {"d": config.dim}, ("channels", "embed")
        bias = nn.initializers.zeros if config.out_bias else None
        project_out = Linear("bct,cd->btd", sizes, names, wide, bias=bias, name="out")
        check_kind(HyenaState, state, filter=type(config.filter).__name__)
        clock = None if state is None else state.clock
        options = {"width": config.dim, "alignment": config.segment_alignment, "packed": config.packed}
        rows = read(x.astype(self.dtype), segment_ids, positions, clock, **options)
        if norm is None:
            z = self._blank(rows, project_in(rows.x).astype(wide))
        else:
            token, parts = token_products(token, [project_in], norm)
            z = self._blank(rows, jnp.sum(parts, 0).astype(self.dtype).reshape(1, -1, 1))
        z, short = self._short(rows, z, None if state is None else state.short)
        v, *gates = jnp.split(rows.clear(z), config.order + 1, axis=1)
        filters = []
        for i in range(config.order - 1):
            post_gate = gates[-1] if i == config.order - 2 else None  # x_N, fused into the last op
            carry: Any = None if state is None else state.filters[i]
            if state is not None and not isinstance(config.filter, ModalFilter):
                check_filter_state(config.filter, carry, state.capacity)
            v, after = self._long_conv(i)(rows, (v, gates[i], post_gate), carry)
            filters.append(after)
        # The driver has zeroed v at a hole: nothing is added to the token there
        y: Any = rows.restore(project_out(v)) if norm is None else token_products(v, [project_out])[1]
        y = y if norm is None else OpenSum(token, y)
        if state is None:
            return y, None
        return y, dataclasses.replace(state, clock=rows.clock, short=short, filters=tuple(filters))

    def _short(self, rows: Rows, z: Float[Array, "B E T"], carry: Float[Array, "B E S"] | None) -> Any:
        """Run the short convolution, and return its past inputs too.

        If not causal, another one over the reversed row is added.
        """
        sides, size = 1 if self.config.causal else 2, self.config.short_taps - 1
        init = named(nn.initializers.normal((size + 1) ** -0.5), None, "channels", "taps")
        taps = self.param("short", init, (sides, z.shape[1], size + 1), jnp.float32)
        offset = None
        if self.config.in_bias:
            start = named(nn.initializers.zeros, "channels")
            offset = self.param("short_bias", start, (z.shape[1],), jnp.float32).astype(z.dtype)[
                None, :, None
            ]
        cores = [ShortHistory(short_conv, side, None, size=size) for side in taps]
        y, after = rows.run(cores[0], (z, None, None), carry, time_axis=2)
        if not self.config.causal:
            y = y + rows.run(cores[1], (z, None, None), time_axis=2, reverse=True)[0]
        return (y if offset is None else self._blank(rows, y + offset)), after

    def _blank(self, rows: Rows, z: Float[Array, "B E T"]) -> Float[Array, "B E T"]:
        """Zero holes and padding, where a bias is not zero."""
        if not self.config.in_bias or rows.content is None:
            return z
        return jnp.where(rows.content[:, None], z, jnp.zeros((), z.dtype))

    def _long_conv(self, index: int) -> ModalConv | FiniteConv:
        config, name = self.config, f"long_{index}"
        options = (config.dim, config.causal, config.implementation)
        if isinstance(config.filter, ModalFilter):
            return ModalConv(config.filter, *options, name=name)
        return FiniteConv(config.filter, *options, name=name)
