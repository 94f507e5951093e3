"""Shapes of hashed n-gram embeddings in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HashShape:
    """B rows of T bytes; a table of R rows of width D for each n in `sizes`."""

    name: str
    batch: int
    length: int
    dim: int
    table_size: int
    sizes: tuple[int, ...] = (3, 4, 5, 6, 7, 8)


SHAPES = (
    # The `books` recipe's encoder.
    HashShape("d512_8k", 16, 8192, 512, 30_000),
    # Byte Latent Transformer (2412.09871), tables as in its released models.
    HashShape("blt_d1024_8k", 4, 8192, 1024, 500_002),
)
