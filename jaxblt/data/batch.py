"""The batch that every pipeline yields and every model reads."""

import flax.struct
from jaxtyping import Array, Float, Int

from jaxblt.show import show


@flax.struct.dataclass
class Batch:
    """A batch of rows of ids, with the document that each id belongs to.

    The id of a byte is byte + 4 (see `jaxblt.data.vocab`). A row may hold several documents, one after another.

    Attributes:
      inputs: ids that the model reads.
      targets: the id after each input. The pipeline shifts them, so that no device needs its neighbour's inputs.
      segment_ids: number of the document at each position, 1, 2, ... within the row; 0 is padding.
      positions: offset of each position in its document, from 0.
      loss_mask: 1 where the target is scored, else 0; a fraction if the objective weights its losses.
      entropies: precomputed entropy in nats of the id after each input, or None to compute it in the step.
      history: for rows that begin inside a document, the document's last ids up to and including the row's first input,
        after PAD on the left. The entropy model reads them. None if no row needs them.
      labels: labels, or None if the objective needs none. They are the class or number of each row, or the class of
        each position (-1 for none). With several tasks they are a dict by task of labels of rows (-1 or NaN for none).
      label_weights: by task, the weight of each row's label in the loss; set by an objective of several tasks.
      documents: key of each position's document (`jaxblt.data.keys`), 0 at padding. Routers with an index leave out
        chunks of the same document. None for other models.
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
