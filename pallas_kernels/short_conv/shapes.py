"""Shapes of short convolutions in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvShape:
    """One layer: B rows of T steps, D channels (all streams of the layer together), K taps; `gated` with both gates.

    `documents` of random lengths in each row.
    """

    name: str
    batch: int
    channels: int
    length: int
    taps: int
    gated: bool = False
    documents: int = 1


SHAPES = (
    # Hyena, order 2: three streams of width 768 through 3 taps.
    ShortConvShape("hyena_d768_8k", 64, 3 * 768, 8192, 3),
    ShortConvShape("hyena_d768_8k_packed", 64, 3 * 768, 8192, 3, documents=8),
    # Rows of which every second begins amid a pair of steps.
    ShortConvShape("hyena_d768_8191", 64, 3 * 768, 8191, 3),
    # HyenaDNA, 1M bases.
    ShortConvShape("hyenadna_1m", 1, 3 * 256, 1_000_000, 3),
    # StripedHyena 2 (Evo 2, 7B): the short filters before the gates, and the explicit filter of Hyena-SE.
    ShortConvShape("evo2_7b_128k", 1, 3 * 4096, 131072, 3),
    ShortConvShape("evo2_7b_se_128k", 1, 4096, 131072, 7, gated=True),
    # The Hyena layers of `configs.books`, three streams of width 1,024 over the patches of 8 rows.
    ShortConvShape("books", 8, 3 * 1024, 2048, 3),
    # Decoding.
    ShortConvShape("evo2_7b_decode", 32, 3 * 4096, 1, 3),
)
