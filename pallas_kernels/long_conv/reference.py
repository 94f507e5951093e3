"""The definition is that of every explicit filter, whatever its length."""

from pallas_kernels._conv.reference import conv_reference as long_conv_reference

__all__ = ["long_conv_reference"]
