"""Convolution with a modal filter: parameters, parallel pass, streaming."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxblt.mixers.base import Tokens, named, rows
from jaxblt.mixers.conv_state import continuing, op_segments
from jaxblt.mixers.filters import ModalFilter
from jaxblt.mixers.streams import local_alignment, over_streams
from jaxblt.parallel.carry import fold_before, from_last
from jaxblt.parallel.halo import splits_sequence
from jaxblt.parallel.islands import over_batch
from jaxblt.parallel.sequence import over_sequence
from pallas_kernels.modal_conv import modal_conv, row_state


class ModalConv(nn.Module):
    """y = post_gate * (h * u + b u), u = pre_gate * v, with h a sum of decaying exponentials.

    Rates are parameters as log(1/tau), so every mode decays whatever the optimiser does. Residues start with
    a variance that gives white input an output of its own size.
    """

    filter: ModalFilter
    dim: int
    causal: bool = True
    segment_alignment: int = 1
    implementation: Any = None

    def setup(self) -> None:
        shape = (1 if self.causal else 2, self.dim, self.filter.modes)
        axes = (None, "channels", "modes")
        self.log_rate = self.param("log_rate", named(self._init_rates, *axes), shape)
        self.residues = self.param("residues", named(self._init_residues, *axes), shape)
        normal = named(nn.initializers.normal(1.0), "channels")
        self.bias = self.param("bias", normal, (self.dim,), jnp.float32)

    def _rates(self) -> np.ndarray:
        """1 / tau of each mode before training, fastest first."""
        fast, slow = np.log(1 / self.filter.min_timescale), np.log(1 / self.filter.max_timescale)
        return np.exp(np.linspace(fast, slow, self.filter.modes))

    def _init_rates(self, key: Array, shape: tuple[int, ...]) -> Float[Array, "S D M"]:
        return jnp.broadcast_to(jnp.asarray(np.log(self._rates()), jnp.float32), shape)

    def _init_residues(self, key: Array, shape: tuple[int, ...]) -> Float[Array, "S D M"]:
        energy = -np.expm1(-2 * self._rates()) / self.filter.modes
        return (
            jax.random.normal(key, shape, jnp.float32) * jnp.asarray(np.sqrt(energy), jnp.float32)[None, None]
        )

    def __call__(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B D T"]:
        """The parallel pass; inputs are zero at holes and padding."""
        log_poles, streams = -jnp.exp(self.log_rate), (v, pre_gate, post_gate)
        shared = (log_poles[0], self.residues[0], self.bias)
        y = over_streams(self._forward, streams, segment_ids, shared)
        if self.causal:
            return y
        return y + over_streams(self._backward, streams, segment_ids, (log_poles[1], self.residues[1]))

    def _forward(self, streams: Any, segment_ids: Any, shared: Any, *, reverse: bool = False) -> Any:
        v, pre_gate, post_gate = streams
        log_poles, residues, bias = shared
        alignment = 1 if reverse else local_alignment(self.segment_alignment, v.shape[-1])
        options = {"segment_ids": segment_ids, "segment_alignment": alignment}
        options["implementation"] = self.implementation
        state = None
        if splits_sequence():
            v, pre_gate = pre_gate * v, None
            state, _ = self._carried(v, log_poles, residues, options, reverse=reverse)
        gates = {"pre_gate": pre_gate, "post_gate": post_gate}
        return modal_conv(v, log_poles, residues, bias=bias, initial_state=state, **gates, **options)

    def _backward(self, streams: Any, segment_ids: Any, shared: Any) -> Float[Array, "B D T"]:
        """The other side of the filter: the same op over the reversed row, where documents start anywhere."""
        streams, segment_ids = jax.tree.map(lambda x: jnp.flip(x, -1), (streams, segment_ids))
        return jnp.flip(self._forward(streams, segment_ids, (*shared, None), reverse=True), -1)

    def stream(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        tokens: Tokens,
        state: Float[Array, "B D M"],
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
        """Outputs of the call's tokens, and s_m = sum_r exp(-(t - r)/tau_m) u_r after the last of them."""
        shared = (-jnp.exp(self.log_rate[0]), self.residues[0], self.bias)
        step = _one_token if v.shape[-1] == 1 else self._chunk
        y, state = over_batch(step, (pre_gate * v, tokens, state), shared)
        return y if post_gate is None else post_gate * y, state

    def prefill(
        self,
        v: Float[Array, "B D T"],
        pre_gate: Float[Array, "B D T"],
        post_gate: Float[Array, "B D T"] | None,
        tokens: Tokens,
        state: Float[Array, "B D M"],
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
        """`stream` for tokens that a mesh splits along the sequence."""
        shared = (-jnp.exp(self.log_rate[0]), self.residues[0], self.bias)
        ids = op_segments(tokens)
        streams = (pre_gate * v, post_gate, None if ids is None else ids[:, None])
        return over_sequence(self._stretch, streams, state, shared, time_axis=2, outputs=(True, False))

    def _stretch(self, streams: Any, state: Any, shared: Any) -> Any:
        (u, post_gate, ids), (log_poles, residues, bias) = streams, shared
        options = {"segment_ids": None if ids is None else ids[:, 0], "implementation": self.implementation}
        entering, leaving = self._carried(u, log_poles, residues, options, start=state)
        y = modal_conv(
            u, log_poles, residues, bias=bias, post_gate=post_gate, initial_state=entering, **options
        )
        return y, from_last(leaving)

    def _carried(
        self,
        u: Any,
        log_poles: Any,
        residues: Any,
        options: dict[str, Any],
        *,
        start: Any = None,
        reverse: bool = False,
    ) -> tuple[Float[Array, "B D M"], Float[Array, "B D M"]]:
        """`_carry` of this device's stretch of inputs."""
        if options["segment_ids"] is None:
            written = row_state(u, log_poles)
        else:
            _, written = modal_conv(u, log_poles, residues, output_final_state=True, **options)
        return _carry(written, log_poles, options["segment_ids"], u.shape[-1], start, reverse=reverse)

    def _chunk(self, batched: Any, shared: Any) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"]]:
        u, tokens, state = batched
        log_poles, residues, bias = shared
        kept = rows(continuing(tokens), state)
        y, after = modal_conv(
            u,
            log_poles,
            residues,
            segment_ids=op_segments(tokens),
            bias=bias,
            initial_state=jnp.where(kept, state, jnp.zeros((), state.dtype)),
            output_final_state=True,
            implementation=self.implementation,
        )
        return y, jnp.where(rows(jnp.any(tokens.live, 1), state), after, state)


def _carry(
    written: Float[Array, "B D M"],
    log_poles: Float[Array, "D M"],
    segment_ids: Int[Array, "B T"] | None,
    length: int,
    start: Float[Array, "B D M"] | None,
    *,
    reverse: bool,
) -> tuple[Float[Array, "B D M"], Float[Array, "B D M"]]:
    """The state before this device's first step, of that step's document, and the state after its last one.

    Args:
      written: what this device's steps leave behind from a state of zero.
      log_poles: of the modes.
      segment_ids, length: of this device's steps.
      start: the state before the row, which continues document 1; None for zero.
      reverse: rows are read from the end, the last device first.
    """
    fresh = start is None
    start = jnp.zeros_like(written) if fresh else start
    if segment_ids is None:
        decay = jnp.exp(log_poles * length)[None]
        entering = fold_before(lambda s, add: decay * s + add, start, written, reverse=reverse)
        return entering, decay * entering + written
    document = jnp.abs(segment_ids)
    live = document != 0
    last = jnp.max(jnp.where(live, jnp.arange(length, dtype=jnp.int32)[None], 0), 1, keepdims=True)
    first, last = (
        jnp.take_along_axis(document, at, 1)[:, 0] for at in (jnp.argmax(live, 1, keepdims=True), last)
    )
    steps = jnp.sum(live, 1, dtype=jnp.int32)

    def join(carry: Any, after: Any) -> Any:
        (state, of), (written, first, last, steps) = carry, after
        decay = jnp.exp(log_poles[None] * steps[:, None, None].astype(log_poles.dtype))
        stays = (steps == 0) | ((first == of) & (last == of))
        kept = jnp.where(rows(stays, state), decay * state, jnp.zeros((), state.dtype))
        return kept + written, jnp.where(steps == 0, of, last)

    of = jnp.full_like(first, 0 if fresh else 1)
    summary = (written, first, last, steps)
    state, of = fold_before(join, (start, of), summary, reverse=reverse)
    leaving, _ = join((state, of), summary)
    return jnp.where(rows(of == document[:, 0], state), state, jnp.zeros((), state.dtype)), leaving


def _one_token(batched: Any, shared: Any) -> tuple[Float[Array, "B D 1"], Float[Array, "B D M"]]:
    """s <- exp(-1/tau) s + u; y = sum_m r_m s_m + b u."""
    u, tokens, state = batched
    log_poles, residues, bias = shared
    x = u[..., 0].astype(jnp.float32)
    carried = jnp.where(
        rows(continuing(tokens), state), jnp.exp(log_poles)[None] * state, jnp.zeros((), state.dtype)
    )
    after = carried + x[..., None]
    y = jnp.sum(residues[None] * after, -1) + bias[None] * x
    return y[..., None].astype(u.dtype), jnp.where(rows(tokens.live[:, 0], state), after, state)
