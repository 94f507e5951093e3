"""Reviews that end in their label, a row each: who reads one is to write its label behind it."""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from experiments.benchmark._mix import Rows
from jaxblt.data.vocab import OFFSET, PAD

MOST = 10
"""Labels, as each is a digit."""


@flax.struct.dataclass
class Reviews:
    """Reviews, each with a line break and the digit of its label at its end.

    Attributes:
      text: of all of them.
      first, size: where each begins, and how long it is with its label.
      label: of each.
      domains: labels.
      weight: bytes that a label counts as in training.
    """

    text: UInt8[Array, "N"]
    first: Int[Array, "R"]
    size: Int[Array, "R"]
    label: Int[Array, "R"]
    domains: int = flax.struct.field(pytree_node=False)
    weight: float = flax.struct.field(pytree_node=False)

    def draw(self, key: Array, rows: int, length: int, spans: tuple[int, int]) -> Rows:
        """Rows of one review each, or of its last bytes; row i of n is drawn from the i-th of n equal parts of them.

        A byte's domain is the review's label. A row without room for the review keeps its end.

        Args:
          key: of the draw.
          rows: of the batch.
          length: T of a row.
          spans: of no account.
        """
        place = (jnp.arange(rows, dtype=jnp.float32) + jax.random.uniform(key, (rows,))) / jnp.float32(rows)
        which = (place * jnp.float32(len(self.size))).astype(jnp.int32)
        count = jnp.minimum(self.size[which], length + 1)[:, None]
        begin = (self.first + self.size)[which][:, None] - count
        t = jnp.arange(length + 1, dtype=jnp.int32)[None]
        there = t < count
        written = jnp.where(there, self.text[jnp.where(there, begin + t, 0)].astype(jnp.int32) + OFFSET, PAD)
        domain = jnp.broadcast_to(self.label[which][:, None], (rows, length))
        since = jnp.broadcast_to(t[:, 1:], (rows, length))
        segments = there[:, 1:].astype(jnp.int32)
        return Rows(written[:, :-1], written[:, 1:], domain, domain, since, segments)

    def weights(self, rows: Rows) -> Float[Array, "B T"]:
        """What each target counts in training: 1, a label more, padding nothing."""
        assert rows.segment_ids is not None
        return rows.segment_ids.astype(jnp.float32) * jnp.where(ends(rows), self.weight, 1.0)

    def right(self, logits: Float[Array, "B T V"], rows: Rows) -> Bool[Array, "B"]:
        """Whether each review's own label is the likeliest of all labels at its end."""
        at_end = jnp.sum(jnp.where(ends(rows)[..., None], logits, 0.0), 1)
        first = OFFSET + ord("0")
        return jnp.argmax(at_end[:, first : first + self.domains], -1) == rows.domain[:, 0]


def ends(rows: Rows) -> Bool[Array, "B T"]:
    """The last target of each row's review."""
    assert rows.segment_ids is not None
    last = jnp.sum(rows.segment_ids, 1, keepdims=True) - 1
    return jnp.arange(rows.inputs.shape[1], dtype=jnp.int32)[None] == last


def open_reviews(found: Sequence[tuple[str, bytes]], labels: Sequence[str], weight: float) -> Reviews:
    """Reviews of (label, text).

    Args:
      found: the reviews.
      labels: all of them, in order.
      weight: bytes that a label counts as.

    Raises:
      ValueError: a label is none of `labels`, or there are more than `MOST`, or fewer than two.
    """
    if not 2 <= len(labels) <= MOST:
        raise ValueError(
            f"reviews have labels {list(labels)}, expected 2 to {MOST}: each is written as a digit"
        )
    if unknown := {label for label, _ in found} - set(labels):
        raise ValueError(
            f"test reviews have labels {sorted(unknown)}, and those to train on have {list(labels)}"
        )
    numbers = [labels.index(label) for label, _ in found]
    texts = [text + b"\n%d" % number for (_, text), number in zip(found, numbers, strict=True)]
    size = np.array([len(text) for text in texts], np.int32)
    first = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    given: Any = (np.frombuffer(b"".join(texts), np.uint8), first, size, np.array(numbers, np.int32))
    return Reviews(*(jnp.asarray(array) for array in given), domains=len(labels), weight=weight)
