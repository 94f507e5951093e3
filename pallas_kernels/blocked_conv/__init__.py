"""Depthwise convolution with explicit filters of medium length, as Toeplitz matrix products."""

from pallas_kernels.blocked_conv.api import TABLE, blocked_conv, explain

__all__ = ["TABLE", "blocked_conv", "explain"]
