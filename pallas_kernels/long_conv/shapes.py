"""Shapes of long convolutions in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LongConvShape:
    """One layer: B rows of T steps, D channels, L taps."""

    name: str
    batch: int
    channels: int
    length: int
    taps: int
    causal: bool = True


SHAPES = (
    # Hyena at the lengths that published kernels are timed at.
    LongConvShape("hyena_d768_8k", 64, 768, 8192, 8192),
    LongConvShape("hyena_d768_16k", 64, 768, 16384, 16384),
    LongConvShape("hyena_d768_32k", 64, 768, 32768, 32768),
    # HyenaDNA: 160K bases, and 1M.
    LongConvShape("hyenadna_160k", 1, 256, 160_000, 160_000),
    LongConvShape("hyenadna_1m", 1, 256, 1_000_000, 1_000_000),
    # An encoder that looks both ways.
    LongConvShape("d768_both_ways_8k", 64, 768, 8192, 8192, causal=False),
)
