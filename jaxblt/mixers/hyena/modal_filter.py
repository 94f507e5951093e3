"""Convolution with a modal filter: parameters, and its core along the sequence."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import named
from jaxblt.mixers.driver.base import rows
from jaxblt.mixers.driver.marks import Marks
from jaxblt.mixers.driver.sequence import Rows
from jaxblt.mixers.hyena.filters import ModalFilter
from pallas_kernels.modal_conv import modal_conv, row_state


class ModalConv(nn.Module):
    """y = post_gate * (h * u + b u), u = pre_gate * v, with h a sum of decaying exponentials.

    Rates are parameters as log(1/tau), so every mode decays whatever the optimiser does. Residues start with
    a variance that gives white input an output of its own size.
    """

    filter: ModalFilter
    dim: int
    causal: bool = True
    implementation: Any = None

    def setup(self) -> None:
        shape = (1 if self.causal else 2, self.dim, self.filter.modes)
        axes = (None, "channels", "modes")
        self.log_rate = self.param("log_rate", named(self._init_rates, *axes), shape)
        self.residues = self.param("residues", named(self._init_residues, *axes), shape)
        normal = named(nn.initializers.normal(1.0), "channels")
        self.bias = self.param("bias", normal, (self.dim,), jnp.float32)

    def _rates(self) -> np.ndarray:
        """Return 1 / tau of each mode before training, fastest first."""
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
        self, rows: Rows, streams: Any, carry: Float[Array, "B D M"] | None
    ) -> tuple[Float[Array, "B D T"], Float[Array, "B D M"] | None]:
        """Return outputs, and the modes' states behind the call.

        Streams are v, pre_gate, post_gate (or None), [B, D, T].
        """
        y, after = rows.run(self._core(0, self.bias), streams, carry, time_axis=2)
        if self.causal:
            return y, after
        other, _ = rows.run(self._core(1, None), streams, time_axis=2, reverse=True)
        return y + other, after

    def _core(self, side: int, bias: Float[Array, "D"] | None) -> "Modes":
        return Modes(-jnp.exp(self.log_rate[side]), self.residues[side], bias, self.implementation)


@flax.struct.dataclass
class Decayed:
    """The effect of a stretch on the modes' states: s <- exp(steps log_poles) s + written; no s where a document began.

    Attributes:
      written: what its inputs leave behind.
      steps: tokens and holes of each row; None for `length`.
      stays: rows in which no document began; None for all.
      length: positions of the stretch.
      final: `written` holds what is left of the state given to the run as well.
    """

    written: Float[Array, "B D M"]
    steps: Int[Array, "B"] | None
    stays: Bool[Array, "B"] | None
    length: int = flax.struct.field(pytree_node=False)
    final: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Modes:
    """Core of a modal convolution: the carry is s_m = sum_r exp(-(t - r) / tau_m) u_r, in fp32."""

    log_poles: Float[Array, "D M"]
    residues: Float[Array, "D M"]
    bias: Float[Array, "D"] | None
    implementation: Any = flax.struct.field(pytree_node=False, default=None)

    def zero(self, streams: Any) -> Float[Array, "B D M"]:
        """Return states without input."""
        return jnp.zeros((streams[0].shape[0], *self.log_poles.shape), jnp.float32)

    def run(
        self, streams: Any, marks: Marks, carry: Float[Array, "B D M"] | None
    ) -> tuple[Float[Array, "B D T"], Decayed | None]:
        """Return outputs; with a carry also the states behind the stretch, as a summary."""
        v, pre_gate, post_gate = streams
        if carry is None:
            return self._conv(v, marks, pre_gate=pre_gate, post_gate=post_gate), None
        # Multiply here, so that the compiler shares the product with `summarise`.
        options = {"post_gate": post_gate, "initial_state": carry, "output_final_state": True}
        y, final = self._conv(pre_gate * v, marks, **options)
        return y, Decayed(final, None, None, v.shape[-1], final=True)

    def summarise(self, streams: Any, marks: Marks) -> Decayed:
        """Return what the stretch leaves behind from states of zero."""
        u, length = streams[1] * streams[0], streams[0].shape[-1]
        if marks.segment_ids is None:
            return Decayed(row_state(u, self.log_poles), None, None, length)
        _, written = self._conv(u, marks, output_final_state=True)
        steps = jnp.sum(marks.segment_ids != 0, 1, dtype=jnp.int32)
        return Decayed(written, steps, marks.stays, length)

    def join(self, carry: Float[Array, "B D M"], summary: Decayed) -> Float[Array, "B D M"]:
        """Return the states behind a stretch."""
        if summary.final:
            return summary.written
        if summary.steps is None:
            return jnp.exp(self.log_poles * summary.length)[None] * carry + summary.written
        steps = summary.steps[:, None, None].astype(self.log_poles.dtype)
        kept = jnp.exp(self.log_poles[None] * steps) * carry
        if summary.stays is not None:
            kept = jnp.where(rows(summary.stays, kept), kept, jnp.zeros((), kept.dtype))
        return kept + summary.written

    def _conv(self, x: Float[Array, "B D T"], marks: Marks, **options: Any) -> Any:
        given = {"segment_ids": marks.segment_ids, "segment_alignment": marks.alignment}
        weights = (self.log_poles, self.residues)
        return modal_conv(x, *weights, bias=self.bias, implementation=self.implementation, **given, **options)
