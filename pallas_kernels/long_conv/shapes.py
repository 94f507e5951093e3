"""Shapes of long convolutions in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LongConvShape:
    """One layer: B rows of T steps, D channels, L taps; `documents` of random lengths in each row."""

    name: str
    batch: int
    channels: int
    length: int
    taps: int
    causal: bool = True
    documents: int = 1


SHAPES = (
    # Hyena at the lengths that published kernels are timed at.
    LongConvShape("hyena_d768_8k", 64, 768, 8192, 8192),
    LongConvShape("hyena_d768_16k", 64, 768, 16384, 16384),
    LongConvShape("hyena_d768_32k", 64, 768, 32768, 32768),
    # Shorter rows, where dense products are an answer too.
    LongConvShape("hyena_d768_1k", 64, 768, 1024, 1024),
    LongConvShape("hyena_d768_2k", 64, 768, 2048, 2048),
    LongConvShape("hyena_d768_4k", 64, 768, 4096, 4096),
    # No power of two, and no multiple of anything.
    LongConvShape("hyena_d768_8191", 64, 768, 8191, 8191),
    LongConvShape("hyena_d768_12289", 64, 768, 12_289, 12_289),
    # A step more than a power of two, and lengths far from any, one on chip and one above.
    LongConvShape("hyena_d768_2049", 64, 768, 2049, 2049),
    LongConvShape("hyena_d768_20000", 64, 768, 20_000, 20_000),
    LongConvShape("hyena_d768_40000", 8, 768, 40_000, 40_000),
    # One short row.
    LongConvShape("one_d768_1k", 1, 768, 1024, 1024),
    # What a device holds of a wide layer whose channels are split over many.
    LongConvShape("few_d32_8k", 1, 32, 8192, 8192),
    LongConvShape("few_d32_32k", 1, 32, 32_768, 32_768),
    LongConvShape("few_d32_1m", 1, 32, 1_000_000, 1_000_000),
    # Rows above what fits on chip, and a step less than a power of two.
    LongConvShape("hyena_d768_64k", 8, 768, 65_536, 65_536),
    LongConvShape("hyena_d768_128k", 8, 768, 131_072, 131_072),
    LongConvShape("hyena_d768_131071", 8, 768, 131_071, 131_071),
    # HyenaDNA: 160K bases, and 1M.
    LongConvShape("hyenadna_160k", 1, 256, 160_000, 160_000),
    LongConvShape("hyenadna_1m", 1, 256, 1_000_000, 1_000_000),
    LongConvShape("hyena_d768_1m", 1, 768, 1_000_000, 1_000_000),
    # An encoder that looks both ways.
    LongConvShape("d768_both_ways_8k", 64, 768, 8192, 8192, causal=False),
    # Packed rows.
    LongConvShape("hyena_d768_8k_packed", 64, 768, 8192, 8192, documents=8),
)
