"""Where queries and blocks stand: in which document, and by which number."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


class Places(NamedTuple):
    """Documents and numbers of queries, or of blocks.

    Attributes:
      ids: of documents; 0 for nothing that sees or is seen.
      numbers: of blocks in their documents; a query has that of the first block which it does not see.
    """

    ids: Int[Array, "B n"]
    numbers: Int[Array, "B n"]

    def see(self, blocks: "Places") -> Bool[Array, "B n M"]:
        """Return which blocks each query may choose."""
        same = (self.ids[:, :, None] == blocks.ids[:, None]) & (self.ids > 0)[:, :, None]
        return same & (blocks.numbers[:, None] < self.numbers[:, :, None])
