"""RMSNorm, dropout and ReLU in one operation."""

from pallas_kernels.norm_dropout.api import TABLE, explain, norm_dropout
from pallas_kernels.norm_dropout.mask import is_kept

__all__ = ["TABLE", "explain", "is_kept", "norm_dropout"]
