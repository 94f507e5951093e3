"""Products of a decoded token in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass

PARTS_OF_ATTENTION = 8
"""Parts of one row's attention (`pallas_kernels.attention.token`)."""


@dataclass(frozen=True)
class TokenShape:
    """Matrices of a token of D channels, and what stands before them.

    Attributes:
      name, dim, widths: of the matrices.
      parts: of the product before, or of attention.
      normed, gated: whether a norm or a gate stands before them. A norm is left to the next product if there are parts,
        which has a gate.
      heads: of attention, whose parts are merged; 0 without it.
    """

    name: str
    dim: int
    widths: tuple[int, ...]
    parts: int = 0
    normed: bool = False
    gated: bool = False
    heads: int = 0

    @property
    def leaves_norm(self) -> bool:
        """Whether the division by the norm is left to the next product."""
        return self.normed and self.parts > 0

    @property
    def channels(self) -> int:
        """Channels of a part."""
        return self.dim * (1 + self.gated)


def block(dim: int, hidden: int, parts: tuple[int, int]) -> tuple[TokenShape, ...]:
    """Return the products of a layer of attention, whose heads have 128 channels; "out" is of a token in one piece."""
    return (
        TokenShape(f"heads_{dim}", dim, (dim,) * 3, normed=True),
        TokenShape(f"out_{dim}", dim, (dim,)),
        TokenShape(f"merged_{dim}", dim, (dim,), PARTS_OF_ATTENTION, heads=dim // 128),
        TokenShape(f"gate_{dim}", dim, (hidden,) * 2, parts[0], normed=True),
        TokenShape(f"down_{dim}", hidden, (dim,), parts[1], gated=True),
    )


SHAPES = (
    # Layers of the entropy model, the local and the latent stacks of `books_1b`, and what Hyena multiplies there.
    *block(768, 2048, (6, 6)),
    *block(1024, 2752, (8, 8)),
    *block(2048, 5504, (8, 8)),
    TokenShape("hyena_2048", 2048, (6144,), normed=True),
)
