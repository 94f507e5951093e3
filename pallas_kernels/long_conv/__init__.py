"""Depthwise convolution with filters of any length, by FFT."""

from pallas_kernels.long_conv.api import TABLE, explain, long_conv

__all__ = ["TABLE", "explain", "long_conv"]
