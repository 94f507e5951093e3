"""Depthwise convolution with filters of any length, by FFT or by a DFT of dense products, in XLA or a Hopper kernel."""

from pallas_kernels.long_conv.api import TABLE, explain, long_conv
from pallas_kernels.long_conv.history import long_conv_history

__all__ = ["TABLE", "explain", "long_conv", "long_conv_history"]
