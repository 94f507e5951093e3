"""Low-rank factors of adapters in 8 bits: V with a scale for each rank, U with one for each output channel."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxblt.precision.weights.kernel import Quantized, quantize_kernel
from jaxblt.precision.weights.products import ADAPTER, KERNEL, Path, ProductSite


class Factor(NamedTuple):
    """A factor of an update.

    Attributes:
      path: of its array.
      summed: how many of its axes, the first ones, are summed over.
      layers: axes of layers in front of them.
    """

    path: Path
    summed: int
    layers: int


def find_factors(params: Mapping[str, Any], products: Mapping[Path, ProductSite]) -> list[Factor]:
    """Return the factors beside the kernels of these products; none where there is no low-rank update."""
    flat: dict[Path, Any] = dict(flatten_dict(params))
    found = []
    for path, site in products.items():
        kernel = flat[*path, KERNEL]
        axes = (kernel.values if isinstance(kernel, Quantized) else kernel).ndim
        for name, summed in (("v", site.summed), ("u", 1)):
            if (place := (*path, ADAPTER, name)) in flat:
                found.append(Factor(place, summed, axes - len(site.shape)))
    return found


def quantize_factors(params: Mapping[str, Any], products: Mapping[Path, ProductSite]) -> dict[str, Any]:
    """Return parameters with V and U of these products in int8: an entry is off by half a scale at the most.

    Routers, gates and codes keep their dtype.

    Raises:
      ValueError: no product has such an update.
    """
    flat: dict[Path, Any] = dict(flatten_dict(params))
    found = find_factors(params, products)
    if not found:
        raise ValueError(
            "adapters are to be quantised, and none of the quantised products has a low-rank update: leave out "
            "--adapters, or adapters=True"
        )
    for factor in found:
        flat[factor.path] = quantize_kernel(
            flat[factor.path], "int8", summed=factor.summed, layers=factor.layers
        )
    return unflatten_dict(flat)
