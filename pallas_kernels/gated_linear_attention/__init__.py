"""Linear attention whose state decays by gates per head, per key channel or per value channel."""

from pallas_kernels.gated_linear_attention.api import TABLE, explain, gated_linear_attention
from pallas_kernels.gated_linear_attention.summary import (
    gated_linear_attention_adjoint,
    gated_linear_attention_summary,
)

__all__ = [
    "TABLE",
    "explain",
    "gated_linear_attention",
    "gated_linear_attention_adjoint",
    "gated_linear_attention_summary",
]
