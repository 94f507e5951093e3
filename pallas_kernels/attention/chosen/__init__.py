"""Attention to blocks that queries choose, by kernels, and the choice of blocks."""
