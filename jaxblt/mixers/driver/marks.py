"""Marks: what each position of a stretch of tokens is, for the core of a mixer."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@flax.struct.dataclass
class Marks:
    """The kinds of a stretch's positions. All None if every position is a token of the carry's document.

    Attributes:
      segment_ids: s > 0 a token of document s, -s a hole in it, 0 nothing; as ops take them.
      new: True where a document begins, at a token or hole.
      begins: rows whose first token or hole begins a document; what was carried to them is zero already.
      takes: rows that hold a token or hole at all; the others keep their carry.
      alignment: documents start at multiples of it, counted from the stretch's first position.
    """

    segment_ids: Int[Array, "B T"] | None
    new: Bool[Array, "B T"] | None = None
    begins: Bool[Array, "B"] | None = None
    takes: Bool[Array, "B"] | None = None
    alignment: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def content(self) -> Bool[Array, "B T"] | None:
        """True for tokens: not for holes and padding."""
        return None if self.segment_ids is None else self.segment_ids > 0

    @property
    def stays(self) -> Bool[Array, "B"] | None:
        """Rows in which no document begins: a carry from before the stretch still counts behind it."""
        return None if self.new is None else ~jnp.any(self.new, 1)

    @property
    def end(self) -> Int[Array, "B"] | None:
        """The position behind each row's last token or hole."""
        if self.segment_ids is None:
            return None
        places = jnp.arange(1, self.segment_ids.shape[1] + 1, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(self.segment_ids != 0, places, 0), 1)

    def resets(self, decay: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Return `decay` made 1 where there is no token and 0 where a document begins."""
        if self.segment_ids is None or self.new is None:
            return decay
        tail = (1,) * (decay.ndim - 2)
        kept = jnp.where((self.segment_ids > 0).reshape(*self.new.shape, *tail), decay, 1)
        return jnp.where(self.new.reshape(*self.new.shape, *tail), 0, kept)

    def inputs(self, x: Float[Array, "B T ..."]) -> Float[Array, "B T ..."]:
        """Return x made 0 where there is no token."""
        if self.segment_ids is None:
            return x
        return jnp.where((self.segment_ids > 0).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), x, 0)


def mark(
    segment_ids: Int[Array, "B T"] | None, past: int | Int[Array, "B"] = 0, *, alignment: int = 1
) -> Marks:
    """Return the marks of a stretch.

    Args:
      segment_ids: of its positions; None if all are tokens of one document that began before it, or begins with it.
      past: the document before the first position, 0 for none.
      alignment: documents start at multiples of it.
    """
    if segment_ids is None:
        return Marks(None, alignment=alignment)
    document = jnp.abs(segment_ids)
    live = document != 0
    first = jnp.broadcast_to(jnp.asarray(past, document.dtype), document.shape[:1])
    new = live & (document != jnp.concatenate([first[:, None], document[:, :-1]], 1))
    place = jnp.argmax(live, 1, keepdims=True)
    begins = jnp.take_along_axis(new, place, 1)[:, 0]
    return Marks(segment_ids, new, begins, jnp.any(live, 1), alignment)
