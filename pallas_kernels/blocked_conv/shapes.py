"""Shapes of medium convolutions in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockedConvShape:
    """One layer: B rows of T steps, D channels, L taps; `documents` of random lengths in each row."""

    name: str
    batch: int
    channels: int
    length: int
    taps: int
    causal: bool = True
    documents: int = 1


SHAPES = (
    # StripedHyena 2 (Evo 2): Hyena-MR, 128 taps.
    BlockedConvShape("evo2_7b_mr_8k", 8, 4096, 8192, 128),
    BlockedConvShape("evo2_7b_mr_128k", 1, 4096, 131072, 128),
    # The same filter at the width of the first Hyena models.
    BlockedConvShape("d768_8k", 64, 768, 8192, 128),
    BlockedConvShape("d768_64k", 8, 768, 65536, 128),
    # Rows that fill no chunk.
    BlockedConvShape("d768_8191", 64, 768, 8191, 128),
    # Packed rows.
    BlockedConvShape("d768_8k_packed", 64, 768, 8192, 128, documents=8),
    # An encoder that looks both ways.
    BlockedConvShape("d768_both_ways_8k", 64, 768, 8192, 128, causal=False),
)
