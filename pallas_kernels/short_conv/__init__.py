"""Causal depthwise convolution with a few taps."""

from pallas_kernels.short_conv.api import TABLE, explain, short_conv

__all__ = ["TABLE", "explain", "short_conv"]
