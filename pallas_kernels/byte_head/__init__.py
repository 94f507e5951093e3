"""Cross-entropy and entropy of byte predictions, straight from hidden states."""

from pallas_kernels.byte_head.api import CROSS_ENTROPY_TABLE, ENTROPY_TABLE, cross_entropy, entropy, explain

__all__ = ["CROSS_ENTROPY_TABLE", "ENTROPY_TABLE", "cross_entropy", "entropy", "explain"]
