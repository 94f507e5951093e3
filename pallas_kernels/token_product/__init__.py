"""A few tokens times matrices in one launch, with the norm before and the gate or the sum behind."""

from pallas_kernels.token_product.api import TABLE, explain, is_one_launch, token_product

__all__ = ["TABLE", "explain", "is_one_launch", "token_product"]
