"""Causal depthwise convolution with sums of exponentials: linear time, state of fixed size."""

from pallas_kernels.modal_conv.api import TABLE, explain, modal_conv
from pallas_kernels.modal_conv.filter import modal_filter
from pallas_kernels.modal_conv.states import row_state

__all__ = ["TABLE", "explain", "modal_conv", "modal_filter", "row_state"]
