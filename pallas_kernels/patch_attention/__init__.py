"""Attention between bytes and patches: `pool`, patches over their own bytes, and `lookup`, bytes over patches."""

from pallas_kernels.patch_attention.api import explain, lookup, pool

__all__ = ["explain", "lookup", "pool"]
