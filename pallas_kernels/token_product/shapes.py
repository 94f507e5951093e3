"""Products of decoded tokens in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenShape:
    """Tokens of width D times matrices of these widths, behind a norm or not, gated or added to what was there."""

    name: str
    tokens: int
    dim: int
    widths: tuple[int, ...]
    normed: bool = True
    gated: bool = False
    added: bool = False


SHAPES = (
    # A local layer of `books_1b`, one row and 64.
    TokenShape("heads_1024", 1, 1024, (1024,) * 3),
    TokenShape("out_1024", 1, 1024, (1024,), normed=False, added=True),
    TokenShape("gate_1024", 1, 1024, (2752,) * 2, gated=True),
    TokenShape("down_1024", 1, 2752, (1024,), normed=False, added=True),
    TokenShape("gate_1024_rows", 64, 1024, (2752,) * 2, gated=True),
    # Its entropy model, and its latent stack.
    TokenShape("gate_768", 1, 768, (2048,) * 2, gated=True),
    TokenShape("gate_2048", 1, 2048, (5504,) * 2, gated=True),
    TokenShape("down_2048_rows", 64, 5504, (2048,), normed=False, added=True),
)
