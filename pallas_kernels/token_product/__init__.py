"""One token times matrices in one launch, with what stands before the products."""

from pallas_kernels.token_product.api import TABLE, explain, is_one_launch, token_product

__all__ = ["TABLE", "explain", "is_one_launch", "token_product"]
