"""Shapes of linear recurrences in real models, shared by the tests and the benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScanShape:
    """B rows of T steps, width D, factors and inputs in `dtype`."""

    name: str
    batch: int
    length: int
    width: int
    dtype: str = "float32"


SHAPES = (
    # The RG-LRU layers of RecurrentGemma 2B (2402.19427).
    LinearScanShape("recurrentgemma_2b_8k", 4, 8192, 2560),
    LinearScanShape("recurrentgemma_2b_8k_bf16", 4, 8192, 2560, "bfloat16"),
    # One row of them, and a narrow one of 2^20 steps: too few columns to fill an H200 with one program each.
    LinearScanShape("recurrentgemma_2b_64k", 1, 65536, 2560),
    LinearScanShape("d256_1m", 1, 1 << 20, 256),
    # A gated recurrence of the width of `configs.books` over its patches.
    LinearScanShape("books", 8, 2048, 1024),
    # The chunks of modal_conv's `d768_64k`, of all channels (8 x 768 rows), and of its `d768_1m`; 16 modes.
    LinearScanShape("modal_d768_64k", 8 * 768, 512, 16),
    LinearScanShape("modal_d768_1m", 768, 8192, 16),
    # Decoding.
    LinearScanShape("recurrentgemma_2b_decode", 32, 1, 2560),
)
