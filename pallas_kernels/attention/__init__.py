"""Softmax attention with grouped heads, windows, packed segments, explicit positions and ALiBi."""

from pallas_kernels.attention.api import attention, attention_with_lse, explain
from pallas_kernels.attention.mask import EMPTY_LSE
from pallas_kernels.attention.part import Part, attend_part, merge_parts, pull_part

__all__ = [
    "EMPTY_LSE",
    "Part",
    "attend_part",
    "attention",
    "attention_with_lse",
    "explain",
    "merge_parts",
    "pull_part",
]
