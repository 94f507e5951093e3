"""Shapes of the neural memory in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NeuralMemoryShape:
    """One layer: B rows of T tokens, H heads of width K, E hidden units of a head (0 for one matrix), C a chunk."""

    name: str
    batch: int
    length: int
    heads: int
    width: int
    hidden: int
    chunk: int


CHUNKS = (16, 64, 256, 1024, 2048, 4096)
"""Tokens of a chunk at which the layer is measured, besides 512."""

SHAPES = (
    # A layer of width 1024, two layers of 4 x 256 units in each of four heads, by chunk.
    *(NeuralMemoryShape(f"d1024_16k_c{c}", 8, 16_384, 4, 256, 1024, c) for c in (512, *CHUNKS)),
    # One long row: its chunks come one after another.
    NeuralMemoryShape("d1024_128k_c2048", 1, 131_072, 4, 256, 1024, 2048),
    # One matrix a head.
    NeuralMemoryShape("linear_16k_c512", 8, 16_384, 4, 256, 0, 512),
)
