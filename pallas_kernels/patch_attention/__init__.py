"""Attention between bytes and patches: `pool`, patches over their own bytes, and `lookup`, bytes over patches.

`take_latest` gives each byte its latest patch as it is.
"""

from pallas_kernels.patch_attention.api import explain, lookup, pool
from pallas_kernels.patch_attention.take import take_latest

__all__ = ["explain", "lookup", "pool", "take_latest"]
