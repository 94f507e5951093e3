"""Softmax attention with grouped heads, windows, packed segments, explicit positions and ALiBi."""

from pallas_kernels.attention import masks, presets, rules
from pallas_kernels.attention.api import (
    attention,
    attention_with_lse,
    explain,
    explain_split,
    split_attention,
)
from pallas_kernels.attention.choices import Chosen
from pallas_kernels.attention.fp8 import GradientScales as Fp8GradientScales
from pallas_kernels.attention.fp8 import Scales as Fp8Scales
from pallas_kernels.attention.fp8 import fp8_attention, fp8_attention_gradients
from pallas_kernels.attention.masks import EMPTY_LSE
from pallas_kernels.attention.partial import (
    Partial,
    merge_partials,
    partial_attention,
    partial_attention_backward,
)
from pallas_kernels.attention.prefix import prefix_attention, skips_empty_slots
from pallas_kernels.attention.scores import SoftCap
from pallas_kernels.attention.token import TokenAttention, token_attention, writes_token

__all__ = [
    "EMPTY_LSE",
    "Chosen",
    "Fp8GradientScales",
    "Fp8Scales",
    "Partial",
    "SoftCap",
    "TokenAttention",
    "attention",
    "attention_with_lse",
    "explain",
    "explain_split",
    "fp8_attention",
    "fp8_attention_gradients",
    "masks",
    "merge_partials",
    "partial_attention",
    "partial_attention_backward",
    "prefix_attention",
    "presets",
    "rules",
    "skips_empty_slots",
    "split_attention",
    "token_attention",
    "writes_token",
]
