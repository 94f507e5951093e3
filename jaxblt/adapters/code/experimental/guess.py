"""Speculative routing: each chunk begins with a guess of its code, made of the codes before it.

`RouterConfig.lag = 2` is the simpler way. There a code is known a whole chunk before it begins, and no guess is needed.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxblt.layers import named
from jaxblt.mixers.driver.marks import Marks
from jaxblt.side_outputs import sow_metric
from jaxblt.validation import check_bounds, check_fields

KEPT = 3
"""Codes that are remembered: a chunk's own, and two before it."""


@dataclasses.dataclass(frozen=True)
class Guess:
    """Guesses g_k = c_{k-1} + a (c_{k-1} - c_{k-2}) in the place of codes c_k that are near; a [E] is learned from 0.

    A guess is accepted if cos(g_k, c_k) > tau. Otherwise the chunk has its exact code c_k. The first code of a document
    is exact, and the second one is guessed without a trend. The metric "guesses" has the number of guesses and how many
    were accepted, of chunks that begin with a token.

    Attributes:
      tau: least cosine; 1 accepts nothing.
    """

    tau: float = 0.95

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "tau", least=-1, most=1, why=": it is a cosine")

    def check(self, adapter: Any) -> None:
        """Raise ValueError for a level other than that of chunks."""
        if adapter.router.level != "chunk":
            raise ValueError(
                f"Guess is of the next chunk's code, and the level is {adapter.router.level!r}: set level='chunk'"
            )

    def init_state(self, batch_size: int, numbers: int) -> "Latest":
        """Return no codes before the first token."""
        return Latest(
            jnp.zeros((batch_size,), jnp.int32),
            jnp.zeros((batch_size, KEPT, numbers), jnp.float32),
            jnp.zeros((batch_size, KEPT), bool),
        )

    def apply(
        self, router: nn.Module, name: str, code: Float[Array, "B T E"], moment: Any, rows: Any, state: Any
    ) -> tuple[Float[Array, "B T E"], Any]:
        """Return the guesses that are accepted, and exact codes elsewhere."""
        edges = moment.changes & moment.known
        found, after = rows.run(LatestCodes(), (code, edges[..., None]), state)
        trend = router.param(
            f"{name}_trend", named(nn.initializers.zeros, "rank"), code.shape[-1:], jnp.float32
        )
        one, two = found.codes[:, :, 1], found.codes[:, :, 2]
        guess = one + jnp.where(found.filled[..., 2:], trend[None, None] * (one - two), 0.0)
        has_guess = found.filled[..., 1] & moment.known
        accepted = has_guess & (cosine(guess, code) > jnp.float32(self.tau))
        counted = edges if rows.content is None else edges & rows.content
        counts = [jnp.sum(counted & which, dtype=jnp.float32) for which in (has_guess, accepted)]
        sow_metric(router, "guesses", jnp.stack(counts))
        return jnp.where(accepted[..., None], guess, code), after


def cosine(a: Float[Array, "B T E"], b: Float[Array, "B T E"]) -> Float[Array, "B T"]:
    """Return the cosine of two codes; 0 where one of them is 0."""
    squares = jnp.sum(a * a, -1) * jnp.sum(b * b, -1)
    inside = squares > 0
    return jnp.where(inside, jnp.sum(a * b, -1) * jax.lax.rsqrt(jnp.where(inside, squares, 1.0)), 0.0)


class Latest(NamedTuple):
    """The latest codes of a stretch of tokens, the last one first.

    Attributes:
      added: number of codes that the stretch adds, at most `KEPT`; `KEPT` too where a document begins.
      codes: the codes.
      filled: which of them there are.
    """

    added: Int[Array, "..."]
    codes: Float[Array, "... n E"]
    filled: Bool[Array, "... n"]

    def then(self, later: "Latest") -> "Latest":
        """Return what both stretches leave, one behind the other."""
        index = jnp.arange(KEPT, dtype=jnp.int32).reshape(*(1,) * later.added.ndim, KEPT)
        place = index - later.added[..., None]
        old = place >= 0
        place = jnp.maximum(place, 0)
        codes = jnp.take_along_axis(self.codes, place[..., None], -2)
        filled = jnp.take_along_axis(self.filled, place, -1)
        return Latest(
            jnp.minimum(self.added + later.added, KEPT),
            jnp.where(old[..., None], codes, later.codes),
            jnp.where(old, filled, later.filled),
        )


@flax.struct.dataclass
class LatestCodes:
    """Core of the latest codes of a document. Streams are codes [B, T, E] and where one begins [B, T, 1]."""

    def zero(self, streams: Any) -> Latest:
        """Return no codes."""
        return jax.tree.map(lambda x: x[:, 0], self._own(streams, jnp.zeros_like(streams[1][..., 0])))

    def run(self, streams: Any, marks: Marks, carry: Latest | None) -> tuple[Latest, Latest]:
        """Return the latest codes at each token, and those of the stretch."""
        codes, edges = streams[0], streams[1][..., 0]
        if marks.segment_ids is not None:
            edges &= marks.segment_ids != 0
        own = self._own(streams, edges)
        if marks.segment_ids is not None and marks.new is not None:
            # Forget the codes of the document before: all places are written anew
            own = own._replace(added=jnp.where(marks.new & (marks.segment_ids != 0), KEPT, own.added))
        scanned = jax.lax.associative_scan(Latest.then, own, axis=1)
        before = self.zero((codes, streams[1])) if carry is None else carry
        before = jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, None], (*codes.shape[:2], *x.shape[1:])), before
        )
        return before.then(scanned), jax.tree.map(lambda x: x[:, -1], scanned)

    def join(self, carry: Latest, summary: Latest) -> Latest:
        """Return the codes behind a stretch."""
        return carry.then(summary)

    @staticmethod
    def _own(streams: Any, edges: Bool[Array, "B T"]) -> Latest:
        """Return the codes that each token adds: its own one, or none."""
        codes = jnp.pad(streams[0][:, :, None], ((0, 0), (0, 0), (0, KEPT - 1), (0, 0)))
        filled = jnp.pad(edges[..., None], ((0, 0), (0, 0), (0, KEPT - 1)))
        return Latest(edges.astype(jnp.int32), codes, filled)
