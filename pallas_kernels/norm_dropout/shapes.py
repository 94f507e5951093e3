"""Shapes of norms with dropout in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NormDropoutShape:
    """B rows of T tokens of width D, of whose entries a share `rate` is dropped."""

    name: str
    batch: int
    length: int
    dim: int
    rate: float = 0.1


SHAPES = (
    # Two rows of `books_1b_transformer`.
    NormDropoutShape("transformer_1b_8k", 2, 8192, 2048),
    NormDropoutShape("transformer_1b_8k_rate_0", 2, 8192, 2048, 0.0),
    # `books`: bytes of the local stacks, patches of the latent one.
    NormDropoutShape("books_bytes", 8, 8192, 512),
    NormDropoutShape("books_patches", 8, 2048, 1024),
    # No power of two.
    NormDropoutShape("d768_32k", 1, 32768, 768),
)
