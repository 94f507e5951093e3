"""Softmax attention with grouped heads, windows, packed segments, explicit positions and ALiBi."""

from pallas_kernels.attention.api import attention, attention_with_lse, explain
from pallas_kernels.attention.mask import EMPTY_LSE

__all__ = ["EMPTY_LSE", "attention", "attention_with_lse", "explain"]
