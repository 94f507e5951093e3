"""The batch that every pipeline yields and every model reads."""

import flax.struct
from jaxtyping import Array, Float, Int

from jaxblt.show import show


@flax.struct.dataclass
class Batch:
    """Rows of bytes with the documents they came from.

    Ids are byte + 4 (see `jaxblt.data.vocab`). A row may hold several documents, each contiguous.

    Attributes:
      inputs: ids read by the model.
      targets: the id after each input, shifted in the pipeline so that no shard needs its neighbour.
      segment_ids: the document of each position, 1, 2, ... in a row; 0 is padding.
      positions: offset in its document, from 0.
      loss_mask: 1 where the target is scored, else 0; fractional where an objective weights its losses.
      entropies: precomputed entropy in nats of the id after each input, or None to compute it in the step.
      history: ids of the document up to each row's first input, that one included, right-aligned behind PAD; for
        the entropy model, where rows begin inside documents. None where there is none to know.
      labels: class or number of each row, or class of each position (-1 where none is asked for), for an objective that
        asks for labels; None for the others. For several tasks those of rows by the task's name, -1 or NaN where a row
        has none.
      label_weights: by task, what each row's label weighs in the loss; an objective of several tasks sets it.
      documents: key of each position's document (`jaxblt.data.keys`), 0 at padding, for routers that must not find it
        in their index; None for models without.
    """

    inputs: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    loss_mask: Int[Array, "B T"] | Float[Array, "B T"]
    entropies: Float[Array, "B T"] | None = None
    history: Int[Array, "B W"] | None = None
    labels: (
        Int[Array, "B"]
        | Float[Array, "B"]
        | Int[Array, "B T"]
        | dict[str, Int[Array, "B"] | Float[Array, "B"]]
        | None
    ) = None
    label_weights: dict[str, Float[Array, "B"]] | None = None
    documents: Int[Array, "B T"] | None = None

    __repr__ = show
