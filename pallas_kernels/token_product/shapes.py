"""Products of a decoded token in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenShape:
    """Matrices of a token of D channels, and what stands before them: parts of the product before, a norm, a gate."""

    name: str
    dim: int
    widths: tuple[int, ...]
    parts: int = 0
    normed: bool = False
    gated: bool = False


def block(dim: int, hidden: int, parts: tuple[int, int]) -> tuple[TokenShape, ...]:
    """Return the products of a layer of attention."""
    return (
        TokenShape(f"heads_{dim}", dim, (dim,) * 3, normed=True),
        TokenShape(f"out_{dim}", dim, (dim,)),
        TokenShape(f"gate_{dim}", dim, (hidden,) * 2, parts[0], normed=True),
        TokenShape(f"down_{dim}", hidden, (dim,), parts[1], gated=True),
    )


SHAPES = (
    # Layers of the entropy model, the local and the latent stacks of `books_1b`, and what Hyena multiplies there.
    *block(768, 2048, (6, 3)),
    *block(1024, 2752, (8, 2)),
    *block(2048, 5504, (6, 1)),
    TokenShape("hyena_2048", 2048, (6144,), normed=True),
)
