"""Shapes of byte heads in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ByteHeadShape:
    """B rows of T bytes, hidden states of width D, V ids."""

    name: str
    batch: int
    length: int
    dim: int
    vocab: int = 260


SHAPES = (
    # The decoder's head of the `books` recipe's model.
    ByteHeadShape("d512_8k", 16, 8192, 512),
    # The entropy model of the Byte Latent Transformer (2412.09871), context 8192.
    ByteHeadShape("blt_entropy_8k", 16, 8192, 768),
    # One document of a million bytes.
    ByteHeadShape("d1024_1m", 1, 1 << 20, 1024),
)
