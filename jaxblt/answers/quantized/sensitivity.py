"""The price of each product's kernel in fewer bits, and the products that are worth quantising."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxblt.answers.protocol import TrainedRun
from jaxblt.answers.quantized.make import Path, Products
from jaxblt.answers.records import Sequences
from jaxblt.answers.score import score
from jaxblt.precision.weights import Scheme, bits_per_weight, dense_params, quantize


class Loss(NamedTuple):
    """The price of one product.

    Attributes:
      path: of the product; of a scanned stack it has all layers.
      bits: per byte, lost if this product alone is quantised.
    """

    path: Path
    bits: float


def bits_per_byte(run: TrainedRun, sequences: Sequences) -> float:
    """Return Σ bits / Σ bytes of all records."""
    found = score(run, sequences)
    return float(-found.log_likelihood.sum() / found.scored.sum() / np.log(2))


def measure_losses(run: TrainedRun, products: Products, scheme: Scheme, sequences: Sequences) -> list[Loss]:
    """Return what each product loses if it alone is quantised, the least first.

    Weights alone are rounded, also for "w8a8". All products are scored by one compiled program.

    Args:
      run: that is not quantised.
      products: of `products_of`.
      scheme: see `jaxblt.precision.weights.Scheme`.
      sequences: to score.
    """
    before, found = bits_per_byte(run, sequences), []
    for path, site in products.items():
        one = {path: site}
        params = dense_params(quantize(run.params, one, scheme), one)
        found.append(Loss(path, bits_per_byte(replace(run, params=params), sequences) - before))
    return sorted(found, key=lambda loss: loss.bits)


def choose_products(
    run: TrainedRun, products: Products, scheme: Scheme, losses: Sequence[Loss], budget: float
) -> list[Path]:
    """Return the products to quantise, the least sensitive first, until weights have `budget` bits in the mean.

    A weight that is not quantised has 16 bits. Scales count.

    Raises:
      ValueError: all products together leave more bits, or 16 bits are within the budget.
    """
    if budget >= 16:
        raise ValueError(f"budget is {budget} bits a weight, expected fewer than the 16 of a weight as it is")
    chosen: list[Path] = []
    for path, _ in losses:
        chosen.append(path)
        if bits_per_weight(run.params, products, scheme, chosen) <= budget:
            return chosen
    least = bits_per_weight(run.params, products, scheme, chosen)
    raise ValueError(
        f"budget is {budget} bits a weight, and {scheme!r} of all products leaves {least:.2f}: raise it"
    )
