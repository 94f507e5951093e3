"""RMSNorm, dropout and ReLU in one operation."""

from pallas_kernels.norm_dropout.api import TABLE, explain, norm_dropout

__all__ = ["TABLE", "explain", "norm_dropout"]
