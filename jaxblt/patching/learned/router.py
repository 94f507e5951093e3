"""The router: from bytes behind the encoder to the probability that a patch ends at each."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxblt.layers import Linear, named
from jaxblt.mixers.driver.base import Clock
from jaxblt.mixers.driver.sequence import Rows, read
from jaxblt.patching.learned.config import BoundaryConfig
from jaxblt.patching.learned.cores import Previous, Responses, motif_table, reach_of
from jaxblt.patching.learned.mixture import DECAY, SHARPNESS, measure_separation
from jaxblt.patching.rules import MIDDLE
from jaxblt.show import show
from jaxblt.side_outputs import sow_loss, sow_metric, sow_next

CODON = 3
TINY = 1e-12
"""Squared lengths below which a vector has no direction."""
COUNTED = "counted"
"""The collection that brings F of a whole batch, and a micro-batch's weight in G: see `Router._ratio`."""
UNDECIDED = 0.05
"""Distance of p from 1/2 below which a byte counts as undecided in the metrics."""


@flax.struct.dataclass
class RouterState:
    """What a router remembers of each row's document.

    Attributes:
      last: the key of the last byte, and 1; zeros before the first byte.
      ids: id + 1 of the bytes that motifs reach back to; None without motifs.
    """

    last: Float[Array, "B C"]
    ids: Int[Array, "B R"] | None

    __repr__ = show


def init_router(config: BoundaryConfig, batch_size: int, *, dim: int, dtype: Any) -> RouterState:
    """Return the state before the first byte, for bytes of width `dim`."""
    keys = dim if "content_similarity" in config.scores else 0
    ids = None
    if "pattern_aware" in config.scores:
        ids = jnp.zeros((batch_size, reach_of(config.longest)), jnp.int32)
    return RouterState(jnp.zeros((batch_size, keys + 1), dtype), ids)


class Router(nn.Module):
    """p_t of `BoundaryConfig`. All of it is computed in fp32, except the products of `content_similarity`.

    Attributes:
      config: of the router.
      vocab_size: ids.
      target: mean length in bytes that the ratio loss leads to; None for no such loss.
    """

    config: BoundaryConfig
    vocab_size: int
    target: float | None = None
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        h: Float[Array, "B T C"],
        ids: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"],
        entropies: Float[Array, "B T"] | None = None,
        state: RouterState | None = None,
    ) -> tuple[Float[Array, "B T"], Float[Array, "B T K"], RouterState | None]:
        """Return p, the scores that it is made of, and the state (None without one).

        Args:
          h: bytes behind the encoder.
          ids: of the bytes.
          segment_ids: documents; with a state one a row, that of the state or a new one whose state is zeros.
          positions: offsets in the document.
          entropies: nats.
          state: before the call.

        Raises:
          ValueError: the router scores by entropies, and there are none.
        """
        found, last = self._neighbours(h, segment_ids, state)
        scores, seen = [], None
        for score in self.config.scores:
            if score == "content_similarity":
                scores.append(_dissimilarity(self._turned("query", h), found[..., :-1]))
            elif score == "entropy_based":
                scores.append(_given(entropies))
            else:
                response, seen = self._responses(ids, segment_ids, positions, state)
                scores.append(response)
        s = jnp.stack(scores, -1)
        begins = found[..., -1:] == 0
        p, slope = self._probability(
            s, h, ~begins if segment_ids is None else ~begins & (segment_ids > 0)[..., None]
        )
        p = jnp.where(begins[..., 0], 1.0, p)
        if state is None:
            self._report(p, slope, segment_ids)
            return p, s, None
        return p, s, RouterState(last.astype(state.last.dtype), seen)

    def _turned(self, name: str, h: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
        """Return h W, with W the identity at first."""
        axes = ("embed", "channels")
        return Linear("btc,cd->btd", {"d": h.shape[-1]}, axes, self.dtype, kernel_init=identity, name=name)(h)

    def _neighbours(
        self, h: Float[Array, "B T C"], segment_ids: Any, state: RouterState | None
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the key of each byte's predecessor and 1, or zeros at a document's first byte; and the last of all."""
        own = jnp.ones_like(h[..., :1])
        if "content_similarity" in self.config.scores:
            own = jnp.concatenate([self._turned("key", h), own.astype(self.dtype)], -1)
        rows = read_document(own, segment_ids, state)
        past, last = rows.run(Previous(), rows.x, None if state is None else state.last)
        return rows.restore(past), last

    def _responses(
        self, ids: Any, segment_ids: Any, positions: Any, state: RouterState | None
    ) -> tuple[Float[Array, "B T"], Any]:
        """Return the largest response of the motifs that end at each byte."""
        config, length = self.config, self.config.longest
        given = motif_table(config.given, length=length, vocab_size=self.vocab_size)
        table = jnp.asarray(given)
        if config.learned_motifs:
            shape = (config.motif_length, self.vocab_size, config.learned_motifs)
            init = named(nn.initializers.normal(1 / config.motif_length), "taps", None, "channels")
            drawn = self.param("motifs", init, shape, jnp.float32)
            drawn = jnp.pad(drawn, ((0, length - config.motif_length), (0, 0), (0, 0)))
            table = jnp.concatenate([table, drawn], -1)
        rows = read_document((ids + 1)[..., None], segment_ids, state)
        found, seen = rows.run(Responses(table), rows.x[..., 0], None if state is None else state.ids)
        response = jnp.max(rows.restore(found), -1)
        if config.codon_phase:
            phase = self.param("phase", named(nn.initializers.zeros, None), (CODON,), jnp.float32)
            response += jax.nn.one_hot(positions % CODON, CODON, dtype=jnp.float32) @ phase
        return response, seen

    def _probability(
        self, s: Float[Array, "B T K"], h: Float[Array, "B T C"], inside: Bool[Array, "B T 1"]
    ) -> tuple[Float[Array, "B T"], Float[Array, ""]]:
        """Return p, and its slope by the score where it is 1/2."""
        if self.config.plain:
            return s[..., 0], jnp.float32(1)
        score = self._mixed(s, h, inside) if self.config.strategy == "adaptive_hybrid" else s[..., 0]
        theta, log_tau = self._scalars("theta", 1), self._scalars("log_tau", 1)
        per_tau = jnp.exp(-log_tau[..., 0])
        return jax.nn.sigmoid((score - theta[..., 0]) * per_tau), per_tau[0, 0] / 4

    def _mixed(
        self, s: Float[Array, "B T K"], h: Float[Array, "B T C"], inside: Bool[Array, "B T 1"]
    ) -> Float[Array, "B T"]:
        """Return the gate's mixture of scores, and tell the step how clearly each parts the bytes `inside`."""
        center, spread = self._scalars("center", s.shape[-1]), self._scalars("log_spread", s.shape[-1])
        separation = jax.lax.stop_gradient(self._scalars("separation", s.shape[-1]))
        names, zeros = ("embed", None), nn.initializers.zeros
        sizes = {"k": s.shape[-1]}
        gate = Linear("btc,ck->btk", sizes, names, jnp.float32, kernel_init=zeros, name="gate")
        share = jax.nn.softmax(gate(h.astype(jnp.float32)) + jnp.float32(SHARPNESS) * separation, -1)
        found = measure_separation(jax.lax.stop_gradient(s), s > center, inside)
        sow_next(self, "separation", DECAY * separation[0, 0] + (1 - DECAY) * found)
        return jnp.sum(share * (s - center) * jnp.exp(-spread), -1)

    def _scalars(self, name: str, count: int) -> Float[Array, "1 1 K"]:
        """Return parameters that `calibrate_router` fills in before step 0."""
        return self.param(name, named(nn.initializers.zeros, None), (count,), jnp.float32)[None, None]

    def _report(
        self, p: Float[Array, "B T"], slope: Float[Array, ""], segment_ids: Int[Array, "B T"] | None
    ) -> None:
        """Sow the ratio loss and what it is made of, over all bytes of the batch.

        A decision may flip where p is nearer to 1/2 than an error of the dtype's eps in the score moves it.
        """
        here = jnp.ones(p.shape, bool) if segment_ids is None else segment_ids > 0
        share = lambda x: _mean(x.astype(jnp.float32), here)  # noqa: E731
        cut, soft = share(p > MIDDLE), share(p)
        if self.target is not None:
            sow_loss(
                self, "ratio", jnp.float32(self.config.ratio_weight) * self._ratio(cut, soft, self.target)
            )
        sow_metric(self, "cut_rate", cut)
        sow_metric(self, "mean_p", soft)
        sow_metric(self, "undecided", share(jnp.abs(p - MIDDLE) < UNDECIDED))
        sow_metric(self, "flip_rate", share(jnp.abs(p - MIDDLE) < slope * float(jnp.finfo(self.dtype).eps)))

    def _ratio(self, cut: Float[Array, ""], soft: Float[Array, ""], target: float) -> Float[Array, ""]:
        """Return the ratio loss of these bytes.

        A micro-batch takes F from the whole batch and weighs its own G. The loss is linear in G, so that the mean over
        micro-batches is the loss of the batch.
        """
        if self.has_variable(COUNTED, "cut_rate"):
            cut = self.get_variable(COUNTED, "cut_rate")
            soft = soft * self.get_variable(COUNTED, "weight")
        return ratio_loss(cut, soft, target)


def identity(key: Array, shape: tuple[int, int], dtype: Any) -> Float[Array, "C D"]:
    """Initialise a kernel with ones on the diagonal."""
    return jnp.eye(*shape, dtype=dtype)


def read_document(x: Shaped[Array, "B T C"], segment_ids: Int[Array, "B T"] | None, state: Any) -> Rows:
    """Read rows; with a state all of a row's tokens go on with one document, as its state was emptied for a new one."""
    clock = None
    if state is not None and segment_ids is not None:
        document = jnp.max(jnp.abs(segment_ids), 1)
        zero = jnp.zeros_like(document)
        clock = Clock(zero, zero, document)
    return read(x, segment_ids, None, clock)


def ratio_loss(cut: Float[Array, ""], soft: Float[Array, ""], target: float) -> Float[Array, ""]:
    """Return N / (N - 1) [(N - 1) F G + (1 - F) (1 - G)] (H-Net, 2507.07955, eq. 10); 1 where F = G = 1/N.

    Args:
      cut: F, the share of bytes at which a patch is wanted to end; it has no gradient.
      soft: G, the mean probability.
      target: N, bytes.
    """
    n = jnp.float32(target)
    return n / (n - 1) * ((n - 1) * cut * soft + (1 - cut) * (1 - soft))


def confidence(p: Float[Array, "*S"], closed: Bool[Array, "*S"]) -> Float[Array, "*S"]:
    """Return 1, with the gradient of p where a patch ended and of 1 - p elsewhere (H-Net, eqs. 6 and 7)."""
    c = jnp.where(closed, p, 1 - p)
    return c + jax.lax.stop_gradient(1 - c)


def _dissimilarity(query: Float[Array, "B T C"], key: Float[Array, "B T C"]) -> Float[Array, "B T"]:
    """Return (1 - cos) / 2 in fp32; 1/2, without a gradient, where a vector is zero."""
    q, k = _direction(query.astype(jnp.float32)), _direction(key.astype(jnp.float32))
    return (1 - jnp.sum(q * k, -1)) / 2


def _direction(x: Float[Array, "B T C"]) -> Float[Array, "B T C"]:
    """Return x / |x|; zero, without a gradient, where x is zero."""
    square = jnp.sum(x * x, -1, keepdims=True)
    known = square > TINY
    return jnp.where(known, x * jax.lax.rsqrt(jnp.where(known, square, 1.0)), 0.0)


def _given(entropies: Float[Array, "B T"] | None) -> Float[Array, "B T"]:
    if entropies is None:
        raise ValueError(
            "the router scores by entropies, and the call has none: hand over those of the frozen entropy model "
            "(entropy_run of the recipe), or leave entropy_based out"
        )
    return jax.lax.stop_gradient(entropies.astype(jnp.float32))


def _mean(x: Float[Array, "B T"], here: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Return the mean over bytes that are there; 0 of none."""
    return jnp.sum(jnp.where(here, x, 0.0)) / jnp.maximum(jnp.sum(here, dtype=jnp.float32), 1.0)
