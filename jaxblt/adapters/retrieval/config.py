"""Which index a router searches, and how many neighbours it looks at."""

import dataclasses

from jaxblt.validation import check_bounds, check_fields


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
    """A router reads six features of the chunks of an index that are nearest to the chunk that it reads.

    The index lies among the parameters of the frozen base, so a run keeps it and nothing trains it. Another index takes
    its place without a new program, as long as `capacity` holds its chunks.

    Attributes:
      index: folder of the index, read once, when a run over its `base_run` starts.
      capacity: the most chunks of an index; places without a chunk are empty and cost as much as others. Above 1,024
        each search copies the index, unless this is a multiple of 1,024.
      neighbours: k, chunks that are looked at; there may be fewer.
    """

    index: str = "index"
    capacity: int = 16384
    neighbours: int = 8

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "capacity", "neighbours", least=1)
        if self.neighbours > self.capacity:
            raise ValueError(
                f"RetrievalConfig.neighbours = {self.neighbours} is more than capacity = {self.capacity} chunks: use "
                "fewer"
            )
