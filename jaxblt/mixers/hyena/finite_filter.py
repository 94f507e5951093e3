"""Convolution with a finite filter, explicit or implicit: parameters, and its core along the sequence."""

import dataclasses
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxblt.layers import named
from jaxblt.mixers.driver.history import ShortHistory, at_first_document, joined, recent
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.prepared import made_once
from jaxblt.mixers.driver.sequence import Rows
from jaxblt.mixers.hyena.doubling import Doubling, DoublingState, init_doubling
from jaxblt.mixers.hyena.filters import ExplicitFilter, FiniteFilter, ImplicitFilter, history_size
from jaxblt.mixers.hyena.implicit_taps import ImplicitTaps, evaluate
from jaxblt.parallel.islands import over_batch
from pallas_kernels import blocked_conv as blocked
from pallas_kernels import long_conv as long
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.long_conv import long_conv, long_conv_history
from pallas_kernels.runtime import is_symbolic

MAX_BLOCKED = 512
"""Taps up to which Toeplitz blocks are faster than an FFT."""

NEAR = 1.5
"""Pixels over which taps of images fall at the start."""

TAPS_BYTES = 2**27
"""Implicit taps of more fp32 bytes are made of a group of channels at a time, about 1/`TAP_GROUPS` of them."""

TAP_GROUPS = 8


def finite_op(filter: FiniteFilter) -> tuple[str, tuple[Any, ...]]:
    """Return the op that convolves with a filter, and its table of implementations."""
    op = blocked if filter.taps <= MAX_BLOCKED else long
    return op.__name__.rsplit(".", 1)[-1], op.TABLE


FilterState = Float[Array, "B D S"] | DoublingState
"""The last inputs of a filter of up to `MAX_BLOCKED` taps; of a longer one with the outputs to come."""


def init_filter_state(
    filter: FiniteFilter, batch_size: int, dim: int, *, capacity: int, dtype: Any
) -> FilterState:
    """Return the state before the first token.

    Raises:
      ValueError: the filter would keep more inputs than `MAX_HISTORY`.
    """
    size = history_size(filter, capacity)
    if filter.taps > MAX_BLOCKED:
        return init_doubling(batch_size, dim, size, dtype)
    return jnp.zeros((batch_size, dim, size), dtype)


def check_filter_state(filter: FiniteFilter, state: FilterState, capacity: int | None) -> None:
    """Raise ValueError for a state that keeps other inputs than `filter` needs.

    Documents have at most `capacity` tokens.
    """
    past = state.past if isinstance(state, DoublingState) else state
    options = {"capacity": filter.taps if capacity is None else capacity, "dtype": past.dtype}
    own = jax.eval_shape(lambda: init_filter_state(filter, *past.shape[:2], **options))
    given, expected = ([x.shape for x in jax.tree.leaves(kept)] for kept in (state, own))
    if given != expected:
        raise ValueError(
            f"the state holds {given} for {type(filter).__name__} of {filter.taps} taps, expected {expected}: make it "
            "by init_state of the same config"
        )


class FiniteConv(nn.Module):
    """y = post_gate * (h * u + b u), u = pre_gate * v, with h of `filter.taps` taps (on either side if not causal).

    A filter without a skip has no b.

    Up to `MAX_BLOCKED` taps a stretch is joined to the next by its last inputs. More taps are convolved over whole
    rows, and in calls of one token by blocks of doubling sizes. Calls with a state make implicit taps once if they are
    prepared.
    """

    filter: FiniteFilter
    dim: int
    causal: bool = True
    implementation: Any = None

    def setup(self) -> None:
        if isinstance(self.filter, ImplicitFilter):
            self.implicit = ImplicitTaps(self.filter, self.dim, 1 if self.causal else 2)
        else:
            self.taps = self._explicit_taps(self.filter)
        normal = named(nn.initializers.normal(1.0), "channels")
        skips = isinstance(self.filter, ImplicitFilter) or self.filter.skip
        self.bias = self.param("bias", normal, (self.dim,), jnp.float32) if skips else None

    def _explicit_taps(self, filter: ExplicitFilter) -> Float[Array, "D L"]:
        """Return the taps of each channel; the parameter has those of a group once."""
        taps = filter.taps if self.causal else 2 * filter.taps - 1
        filters, axis = (self.dim, "channels") if filter.groups is None else (filter.groups, None)
        start = nn.initializers.normal(taps**-0.5) if filter.columns is None else near_pixels(filter)
        param = self.param("taps", named(start, axis, "taps"), (filters, taps), jnp.float32)
        return param if filters == self.dim else jnp.repeat(param, self.dim // filters, axis=0)

    def __call__(
        self, rows: Rows, streams: Any, carry: FilterState | None
    ) -> tuple[Float[Array, "B D T"], FilterState | None]:
        """Return outputs, and what later outputs need of the inputs.

        Streams are v, pre_gate and post_gate (or None), [B, D, T].
        """
        if self.filter.taps > MAX_BLOCKED:
            assert carry is None or isinstance(carry, DoublingState)
            return self._long(rows, streams, carry)
        assert not isinstance(carry, DoublingState)
        core = self._stretches(rows.length, carry)
        y, after = rows.run(core, streams, carry, time_axis=2)
        if self.causal:
            return y, after
        other, _ = rows.run(dataclasses.replace(core, outside=True), streams, time_axis=2, reverse=True)
        return y + other, after

    def _long(
        self, rows: Rows, streams: Any, state: DoublingState | None
    ) -> tuple[Float[Array, "B D T"], DoublingState | None]:
        if state is None and not rows.split:
            return rows.run(self._whole_rows(*self._made_of(rows.length)), streams, time_axis=2)
        # Leave gates where they are: only what is convolved moves between devices, and into the state.
        v, pre_gate, post_gate = streams
        y, after = self._moved(rows, pre_gate * v, state)
        return y if post_gate is None else post_gate * y, after

    def _moved(
        self, rows: Rows, u: Float[Array, "B D T"], state: DoublingState | None
    ) -> tuple[Float[Array, "B D T"], DoublingState | None]:
        alone = (u, None, None)
        if state is None:
            return rows.run(self._whole_rows(*self._made_of(rows.length)), alone, time_axis=2)
        taps = self._streamed(state.past.shape[-1])
        if u.shape[-1] == 1:
            step = lambda given, core: core.next(*given)  # noqa: E731
            return over_batch(step, (u, rows.segment_ids, state), Doubling(taps, self.bias))
        y, past = rows.run(self._whole_rows(None, taps), alone, state.ordered(), time_axis=2)
        takes = None if rows.segment_ids is None else jnp.any(rows.segment_ids != 0, 1)
        assert past is not None
        return y, state.behind(past, takes)

    def _stretches(self, length: int, carry: Float[Array, "B D S"] | None) -> ShortHistory:
        if carry is None:
            taps = _taps(self.filter, self.causal, *self._made_of(length))
        else:
            taps = self._streamed(carry.shape[-1])
        size = (taps.shape[1] if self.causal else taps.shape[1] // 2 + 1) - 1
        return ShortHistory(
            blocked_conv,
            taps,
            self.bias,
            size=size if carry is None else carry.shape[-1],
            causal=self.causal,
            options=(("implementation", self.implementation),),
        )

    def _streamed(self, size: int) -> Float[Array, "D L"]:
        """Return the taps that `size` past inputs and the next one meet."""
        length = min(size + 1, self.filter.taps)
        if not isinstance(self.filter, ImplicitFilter):
            return self.taps[:, :length]
        taps = made_once(self, "taps", lambda: _taps(self.filter, True, *self._made_of(length)))
        if taps.shape[1] != length:
            raise ValueError(
                f"{taps.shape[1]} taps were prepared and the state needs {length}: prepare with a state of its capacity"
            )
        return taps

    def _whole_rows(self, shared: Any, per_channel: Any) -> "LongHistory":
        return LongHistory(
            shared,
            per_channel,
            self.bias,
            self.filter,
            causal=self.causal,
            implementation=self.implementation,
        )

    def _made_of(self, length: int) -> tuple[Any, Any]:
        """Return what the first min(length, taps) taps are made of: shared, and by channel.

        Explicit taps are themselves the second; the first is None then.
        """
        length = self.filter.taps if is_symbolic(length) else min(length, self.filter.taps)
        if isinstance(self.filter, ImplicitFilter):
            return self.implicit.parts(length)
        zero = 0 if self.causal else self.filter.taps - 1
        first = 0 if self.causal else zero - length + 1
        return None, self.taps[:, first : zero + length]


def near_pixels(filter: ExplicitFilter) -> nn.initializers.Initializer:
    """Return normal taps whose deviation falls with the distance r in the image, exp(-r^2 / 2 `NEAR`^2), of energy 1.

    Lag l is |l| = y columns + x pixels away, |x| at most half a row. The last lags are those of the shape.
    """
    assert filter.columns is not None
    lags = np.arange(1 - filter.taps, filter.taps)
    rows = np.round(lags / filter.columns)
    squares = rows**2 + (lags - rows * filter.columns) ** 2
    deviations = np.exp(-squares / (2 * NEAR**2))

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Float[Array, "D L"]:
        own = deviations[-shape[1] :]
        return jax.random.normal(key, shape, dtype) * jnp.asarray(own / np.sqrt(np.sum(own**2)), dtype)[None]

    return init


def _taps(filter: FiniteFilter, causal: bool, shared: Any, per_channel: Any) -> Float[Array, "D L"]:
    """Return the taps; not causal: [D, 2L - 1] with lag 0 in the middle."""
    if not isinstance(filter, ImplicitFilter) or shared is None:
        return per_channel
    sides = evaluate(filter, shared, per_channel)
    if causal:
        return sides[0]
    return jnp.concatenate([jnp.flip(sides[1, :, 1:], -1), sides[0]], axis=-1)


@flax.struct.dataclass
class LongHistory:
    """Core of a convolution with taps as long as the row, in [B, D, T]: whole rows of some channels.

    y = post_gate (h * u + b u), u = pre_gate v; streams are v, pre_gate and post_gate, the last two None with a carry.
    Without a carry the taps are made where they are used: many implicit ones by groups of channels, so that they never
    all exist. The carry is the last S inputs, S the size of what enters.
    """

    shared: Any
    per_channel: Any
    bias: Float[Array, "D"] | None
    filter: FiniteFilter = flax.struct.field(pytree_node=False)
    causal: bool = flax.struct.field(pytree_node=False)
    implementation: Any = flax.struct.field(pytree_node=False)
    groups: int = flax.struct.field(pytree_node=False, default=4)
    per_head: tuple[str, ...] = flax.struct.field(pytree_node=False, default=("per_channel", "bias"))

    def zero(self, streams: Any) -> Float[Array, "B D 1"]:
        """Return a past without inputs, whatever its size."""
        return jnp.zeros((*streams[0].shape[:2], 1), streams[0].dtype)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B D S"] | None
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D S"] | None]:
        """Return outputs, and the last inputs."""
        options = {
            "segment_ids": marks.segment_ids,
            "segment_alignment": marks.alignment,
            "causal": self.causal,
            "implementation": self.implementation,
        }
        if carry is None:
            return self._whole(streams, options), None
        u, taps = streams[0], _taps(self.filter, self.causal, self.shared, self.per_channel)
        after = joined(carry, recent(u, marks, carry.shape[-1]))
        earlier = long_conv_history(carry, taps, steps=u.shape[-1])
        # Name no kernel: kernels take no fp32, in which history and piece are added.
        if self.implementation in ("mosaic_gpu_vjp", "mosaic_gpu_half"):
            options["implementation"] = None
        y = long_conv(u.astype(jnp.float32), taps, bias=self.bias, **options) + at_first_document(
            earlier, marks
        )
        return y.astype(u.dtype), after

    def _whole(self, streams: Any, options: dict[str, Any]) -> Float[Array, "B D T"]:
        """Convolve rows without a carry.

        Where taps are many, one group of channels follows another.
        """

        def conv(given: tuple[Any, Any, Any]) -> Float[Array, "B D T"]:
            (v, pre_gate, post_gate), per_channel, bias = given
            taps = _taps(self.filter, self.causal, self.shared, per_channel)
            return long_conv(v, taps, bias=bias, pre_gate=pre_gate, post_gate=post_gate, **options)

        shape = streams[0].shape
        channels, size = shape[1], self._group_size(shape[1])
        if size == channels:
            return conv((streams, self.per_channel, self.bias))
        groups = -(-channels // size)

        def split(x: Array, axis: int) -> Array:
            # Fill the last group up with its last channel: a number of channels may be prime
            short = [(0, groups * size - channels) if i == axis else (0, 0) for i in range(x.ndim)]
            shape = (*x.shape[:axis], groups, size, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, short, mode="edge").reshape(shape), axis, 0)

        weights = jax.tree.map(lambda x: split(x, 0), (self.per_channel, self.bias))
        streams = jax.tree.map(lambda x: split(x, 1), streams)
        # Make a group's taps again in the backward pass, or all of them would be kept.
        y = jax.lax.map(jax.checkpoint(conv), (streams, *weights))
        return jnp.moveaxis(y, 0, 1).reshape(shape[0], groups * size, shape[2])[:, :channels]

    def _group_size(self, channels: int) -> int:
        """Return how many channels' taps are made at a time.

        Of many implicit taps it is an eighth (1/`TAP_GROUPS`), rounded up.
        """
        sides = 1 if self.causal else 2
        if self.shared is None or 4 * sides * channels * self.shared.shape[0] <= TAPS_BYTES:
            return channels
        return -(-channels // TAP_GROUPS)
