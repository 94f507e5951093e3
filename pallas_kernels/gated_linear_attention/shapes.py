"""Shapes of linear attention in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LinearAttentionShape:
    """One layer: B rows of T steps, heads of v, heads of k, widths K and V, and what has gates of its own."""

    name: str
    batch: int
    length: int
    heads: int
    key_heads: int
    keys: int
    values: int
    gate: Literal["head", "key", "value"] = "head"


SHAPES = (
    # Mamba-2 2.7B: 80 heads of 64 share one of keys and queries, the state's width (2405.21060).
    LinearAttentionShape("mamba2_2b_8k", 8, 8192, 80, 1, 128, 64),
    # Gated linear attention 1.3B: keys of half the width, gates by key channel (2312.06635).
    LinearAttentionShape("gla_1b_8k", 8, 8192, 4, 4, 256, 512, "key"),
    # The two calls of gated slot attention 1.3B: 64 slots are written, then read (2409.07146).
    LinearAttentionShape("gsa_1b_write_8k", 8, 8192, 4, 4, 512, 64, "value"),
    LinearAttentionShape("gsa_1b_read_8k", 8, 8192, 4, 4, 64, 512, "key"),
    # The two calls of a state engine as by default, 16 slots, in a model of width 512, and of SimplePulse, 128 slots.
    LinearAttentionShape("engine_write_8k", 8, 8192, 8, 8, 64, 16, "value"),
    LinearAttentionShape("engine_read_8k", 8, 8192, 8, 8, 16, 64, "key"),
    LinearAttentionShape("pulse_write_8k", 8, 8192, 8, 8, 64, 128, "value"),
    LinearAttentionShape("pulse_write_1x16k", 1, 16_384, 8, 8, 64, 128, "value"),
    LinearAttentionShape("pulse_read_8k", 8, 8192, 8, 8, 128, 64, "key"),
    # Slots written to few rows, which are cut into stretches: SimplePulse's in shorter rows, then 64 and 128 slots of a
    # model of width 1,024.
    LinearAttentionShape("pulse_write_1x1k", 1, 1024, 8, 8, 64, 128, "value"),
    LinearAttentionShape("pulse_write_1x4k", 1, 4096, 8, 8, 64, 128, "value"),
    LinearAttentionShape("pulse_write_4x2k", 4, 2048, 8, 8, 64, 128, "value"),
    LinearAttentionShape("engine_write_1x4k", 1, 4096, 8, 8, 128, 64, "value"),
    LinearAttentionShape("engine_write_1x16k", 1, 16_384, 8, 8, 128, 64, "value"),
    LinearAttentionShape("engine_write_128_1x16k", 1, 16_384, 8, 8, 128, 128, "value"),
    LinearAttentionShape("engine_write_128_1x64k", 1, 65_536, 8, 8, 128, 128, "value"),
    LinearAttentionShape("engine_write_8x8k", 8, 8192, 8, 8, 128, 64, "value"),
    # The same calls with one gate a head: what gates of each slot cost.
    LinearAttentionShape("gsa_1b_write_head_8k", 8, 8192, 4, 4, 512, 64),
    LinearAttentionShape("gsa_1b_read_head_8k", 8, 8192, 4, 4, 64, 512),
    LinearAttentionShape("pulse_write_head_8k", 8, 8192, 8, 8, 64, 128),
    LinearAttentionShape("pulse_read_head_8k", 8, 8192, 8, 8, 128, 64),
    # Shapes that kernels for Hopper are timed at.
    LinearAttentionShape("h32_d128_8k", 8, 8192, 32, 32, 128, 128),
    LinearAttentionShape("h32_d128_64k", 1, 65536, 32, 32, 128, 128),
    LinearAttentionShape("h32_d128_gla_8k", 8, 8192, 32, 32, 128, 128, "key"),
    LinearAttentionShape("h32_d128_value_8k", 8, 8192, 32, 32, 128, 128, "value"),
    # One row of 8 heads, which fill few of a GPU's multiprocessors.
    LinearAttentionShape("h8_d128_1x16k", 1, 16_384, 8, 8, 128, 128),
    LinearAttentionShape("h8_d128_gla_1x16k", 1, 16_384, 8, 8, 128, 128, "key"),
    # Decoding.
    LinearAttentionShape("decode_64", 64, 1, 32, 32, 128, 128),
    LinearAttentionShape("decode_64_key", 64, 1, 32, 32, 128, 128, "key"),
    LinearAttentionShape("mamba2_2b_decode", 32, 1, 80, 1, 128, 64),
)
