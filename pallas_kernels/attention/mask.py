"""Which keys a query sees: the arguments that say so, as one object."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

EMPTY_LSE = -1e30
"""Log-sum-exp of a query that sees no key: finite, so that merging partial results needs no special case."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A key is visible iff every condition that is given holds.

    Attributes:
      causal: position of the key <= position of the query.
      window: distance in positions < window; to the left alone if causal, to both sides otherwise.
      q_segment_ids, kv_segment_ids: equal, and > 0.
      q_positions, kv_positions: what causal, window and ALiBi compare; indices if None.
      lengths: the key's index < lengths[b]; if T == S the query's index too.
      q_lengths: the query's index < q_lengths[b]; of a part alone.
      kv_lengths: the key's index < kv_lengths[b], whatever the query's; of a part alone.
      same_tokens: the promise that queries and keys are the same tokens, so that both segment ids are alike.
    """

    causal: bool = field(metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    q_segment_ids: Int[Array, "B T"] | None = None
    kv_segment_ids: Int[Array, "B S"] | None = None
    q_positions: Int[Array, "B T"] | None = None
    kv_positions: Int[Array, "B S"] | None = None
    lengths: Int[Array, "B"] | None = None
    q_lengths: Int[Array, "B"] | None = None
    kv_lengths: Int[Array, "B"] | None = None
    same_tokens: bool = field(default=False, metadata={"static": True})

    def distances(self, queries: int, keys: int) -> Int[Array, "B T S"]:
        """Position of the query less position of the key; B is 1 if they are indices."""
        here, there = self.q_positions, self.kv_positions
        here = jnp.arange(queries, dtype=jnp.int32)[None] if here is None else here
        there = jnp.arange(keys, dtype=jnp.int32)[None] if there is None else there
        return here[:, :, None] - there[:, None, :]

    def dense(self, queries: int, keys: int) -> Bool[Array, "B T S"]:
        """The mask as an array; B is 1 if it is the same for all rows."""
        distance = self.distances(queries, keys)
        seen = jnp.ones_like(distance, bool)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= (distance if self.causal else jnp.abs(distance)) < self.window
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            here, there = self.q_segment_ids[:, :, None], self.kv_segment_ids[:, None, :]
            seen = seen & (here == there) & (there > 0)
        if self.lengths is not None:
            content = prefix(self.lengths, keys)
            seen = seen & content[:, None, :]
            if queries == keys:
                seen = seen & content[:, :, None]
        if self.q_lengths is not None:
            seen = seen & prefix(self.q_lengths, queries)[:, :, None]
        if self.kv_lengths is not None:
            seen = seen & prefix(self.kv_lengths, keys)[:, None, :]
        return seen

    def valid(self, queries: int, keys: int) -> tuple[Bool[Array, "B T"] | None, Bool[Array, "B S"] | None]:
        """Queries and keys that are neither padding nor holes; None where all are valid."""
        q_valid = None if self.q_segment_ids is None else self.q_segment_ids > 0
        kv_valid = None if self.kv_segment_ids is None else self.kv_segment_ids > 0
        if self.lengths is not None:
            content = prefix(self.lengths, keys)
            kv_valid = content if kv_valid is None else kv_valid & content
            if queries == keys:
                q_valid = content if q_valid is None else q_valid & content
        if self.q_lengths is not None:
            content = prefix(self.q_lengths, queries)
            q_valid = content if q_valid is None else q_valid & content
        if self.kv_lengths is not None:
            content = prefix(self.kv_lengths, keys)
            kv_valid = content if kv_valid is None else kv_valid & content
        return q_valid, kv_valid


def prefix(lengths: Int[Array, "B"], size: int) -> Bool[Array, "B S"]:
    """True at the first lengths[b] places of row b."""
    return jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]


def check_arguments(q: Any, k: Any, v: Any, mask: Mask, alibi_slopes: Any) -> None:
    """Raises ValueError, naming the value and the fix, for arguments that do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"expected q [B, T, H, K] and k, v of one shape [B, S, G, K], got {q.shape}, {k.shape}, {v.shape}"
        )
    (batch, queries, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != width or heads % groups:
        raise ValueError(
            f"q {q.shape} and k {k.shape} must agree in B and K, and H = {heads} divide by G = {groups}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first")
    if alibi_slopes is not None and alibi_slopes.shape != (heads,):
        raise ValueError(
            f"alibi_slopes must have one slope a head, shape {(heads,)}, got {alibi_slopes.shape}"
        )
    _check_mask(mask, batch, queries, keys, distances=mask.causal or alibi_slopes is not None)


def _check_mask(mask: Mask, batch: int, queries: int, keys: int, *, distances: bool) -> None:
    if mask.window is not None and mask.window < 1:
        raise ValueError(f"window must be at least 1 (the query's own position), got {mask.window}")
    for name in ("segment_ids", "positions"):
        ours, theirs = getattr(mask, f"q_{name}"), getattr(mask, f"kv_{name}")
        if (ours is None) != (theirs is None):
            raise ValueError(f"q_{name} and kv_{name} go together: pass both or neither")
        if ours is not None and (ours.shape != (batch, queries) or theirs.shape != (batch, keys)):
            expected = f"{(batch, queries)} and {(batch, keys)}"
            raise ValueError(f"q_{name} and kv_{name} must be {expected}, got {ours.shape}, {theirs.shape}")
    for name in ("lengths", "q_lengths", "kv_lengths"):
        lengths = getattr(mask, name)
        if lengths is not None and lengths.shape != (batch,):
            raise ValueError(f"{name} must have shape {(batch,)}, got {lengths.shape}")
    if queries != keys and mask.q_positions is None and (distances or mask.window is not None):
        raise ValueError(
            f"T = {queries} queries against S = {keys} keys: causal, window and ALiBi compare positions, "
            "so pass q_positions and kv_positions"
        )


def without_padding(
    q: Array, k: Array, v: Array, mask: Mask
) -> tuple[Array, Array, Array, Bool[Array, "B T"] | None]:
    """q, k, v with zeros where no token is (there may be anything, NaN too), and which queries are tokens."""
    q_valid, kv_valid = mask.valid(q.shape[1], k.shape[1])
    return zero_where_not(q_valid, q), zero_where_not(kv_valid, k), zero_where_not(kv_valid, v), q_valid


def zero_where_not(valid: Bool[Array, "B T"] | None, x: Array) -> Array:
    """x, with zeros in value and in gradient where not `valid`."""
    return x if valid is None else jnp.where(valid[:, :, None, None], x, jnp.zeros((), x.dtype))
