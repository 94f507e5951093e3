"""Hashed n-grams of bytes, and the sum of their rows in embedding tables."""

from pallas_kernels.hash_embedding.api import TABLE, explain, hash_embedding
from pallas_kernels.hash_embedding.hashes import ngram_rows

__all__ = ["TABLE", "explain", "hash_embedding", "ngram_rows"]
