"""Shapes of the gated delta rule in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleShape:
    """One layer: B rows of T steps, heads of v, heads of k, widths K and V."""

    name: str
    batch: int
    length: int
    heads: int
    key_heads: int
    keys: int
    values: int


SHAPES = (
    # Qwen3-Next 80B-A3B: 32 heads of values share 16 of keys.
    DeltaRuleShape("qwen3_next_32k", 1, 32768, 32, 16, 128, 128),
    # Shapes that kernels for Hopper are timed at.
    DeltaRuleShape("h32_kv8_d128_32k", 1, 32768, 32, 8, 128, 128),
    DeltaRuleShape("h32_d128_32k", 1, 32768, 32, 32, 128, 128),
    DeltaRuleShape("h32_d128_4k", 8, 4096, 32, 32, 128, 128),
    DeltaRuleShape("h32_d128_256k", 1, 262_144, 32, 32, 128, 128),
    # Decoding.
    DeltaRuleShape("decode_64", 64, 1, 32, 32, 128, 128),
    DeltaRuleShape("qwen3_next_decode", 32, 1, 32, 16, 128, 128),
)
