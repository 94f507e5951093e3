"""Runs with quantised weights, and what they cost product by product."""

from jaxblt.answers.quantized.flips import Flips, count_flips
from jaxblt.answers.quantized.make import products_of, quantize_run
from jaxblt.answers.quantized.sensitivity import Loss, choose_products, measure_losses

__all__ = [
    "Flips",
    "Loss",
    "choose_products",
    "count_flips",
    "measure_losses",
    "products_of",
    "quantize_run",
]
