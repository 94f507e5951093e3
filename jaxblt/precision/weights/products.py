"""Which products of a model have their kernels quantised, and parameters with such kernels."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array

from jaxblt.einsums import multiply, read_equation
from jaxblt.layers import Linear, StoredKernel
from jaxblt.precision.sites import MULTIPLE
from jaxblt.precision.weights.kernel import BITS, GROUP, Quantized, Scheme, quantize_kernel

Path = tuple[str, ...]
KERNEL, ADAPTER, ROUTER = "kernel", "adapter", "router"


class ProductSite(NamedTuple):
    """A product whose kernel may be quantised.

    Attributes:
      shape: of one layer's kernel.
      summed: how many of its axes, the first ones, are summed over.
    """

    shape: tuple[int, ...]
    summed: int

    @property
    def sides(self) -> tuple[int, int]:
        """Sizes of the matrix: what is summed over, and the output channels."""
        return prod(self.shape[: self.summed]), prod(self.shape[self.summed :])


def find_products[T](dtype: Any, trace: Callable[[], T]) -> tuple[dict[Path, ProductSite], T]:
    """Return the products of a trace whose kernels may be quantised, by path, and the trace's result.

    Such a `Linear` computes in `dtype`, and its sides divide by 16. Heads and gates that sum in fp32, filters that ask
    for a precision, and routers are none.
    """
    found: dict[Path, ProductSite] = {}

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        if isinstance(context.module, Linear) and context.method_name == "products":
            x, layers, _ = args
            for layer in layers:
                summed, shape = len(read_equation(layer.equation).summed), layer.kernel_shape(x)
                site = ProductSite(shape, summed)
                if _is_plain(layer, dtype) and not any(side % MULTIPLE for side in site.sides):
                    found[tuple(layer.path)] = site
        return call(*args, **options)

    with nn.intercept_methods(record):
        result = trace()
    return found, result


def _is_plain(layer: Linear, dtype: Any) -> bool:
    letters = read_equation(layer.equation)
    own = layer.accumulate is None and layer.precision is None and layer.product is multiply
    apart = not set(letters.new) & set(letters.given)
    return own and apart and ROUTER not in layer.path and jnp.dtype(layer.dtype) == jnp.dtype(dtype)


def quantize(
    params: Mapping[str, Any],
    products: Mapping[Path, ProductSite],
    scheme: Scheme,
    *,
    inputs: Mapping[Path, Array] | None = None,
) -> dict[str, Any]:
    """Return parameters with the kernels of these products quantised.

    Args:
      params: of the model, unboxed.
      products: of `find_products`, or some of them.
      scheme: see `Scheme`. In "int4" a product stays as it is if the last axis that it sums over is odd.
      inputs: scales of activations of each product ("w8a8"), see `input_scales`; None for scales of each token.

    Raises:
      ValueError: there is no product, or a kernel is quantised already.
    """
    if not products:
        raise ValueError(
            f"there is no product to quantise: a Linear needs sides that divide by {MULTIPLE}, and must not sum in fp32"
        )
    if inputs is not None and scheme != "w8a8":
        raise ValueError(f"scheme {scheme!r} has activations in the compute dtype: calibrate 'w8a8' only")
    refuse_quantized(params, "quantize")
    flat: dict[Path, Any] = dict(flatten_dict(params))
    for path, site in products.items():
        if scheme == "int4" and site.shape[site.summed - 1] % 2:
            continue
        kernel = flat[*path, KERNEL]
        flat[*path, KERNEL] = quantize_kernel(
            kernel,
            scheme,
            summed=site.summed,
            layers=kernel.ndim - len(site.shape),
            inputs=None if inputs is None else inputs[path],
        )
    return unflatten_dict(flat)


def is_stored(leaf: Any) -> bool:
    """Return whether a node of parameters is a quantised kernel."""
    return isinstance(leaf, StoredKernel)


def has_quantized(params: Any) -> bool:
    """Return whether a kernel of these parameters is quantised."""
    return any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored)))


def refuse_quantized(params: Any, what: str) -> None:
    """Raise ValueError for parameters of which a kernel is quantised."""
    if has_quantized(params):
        raise ValueError(f"{what} needs weights that are not quantised: open the run that they were made of")


def dense_params(params: Any, products: Mapping[Path, ProductSite]) -> Any:
    """Return parameters with quantised kernels as fp32 arrays: the same values, and programs of any scheme."""
    flat: dict[Path, Any] = dict(flatten_dict(params))
    for path, site in products.items():
        kernel = flat[*path, KERNEL]
        layers = (kernel.values if isinstance(kernel, Quantized) else kernel).ndim - len(site.shape)
        for place in ((*path, KERNEL), *((*path, ADAPTER, name) for name in "vu")):
            if isinstance(flat.get(place), Quantized):
                flat[place] = _dense(flat[place], layers)
    return unflatten_dict(flat)


@partial(jax.jit, static_argnums=1)
def _dense(kernel: Quantized, layers: int) -> Array:
    make: Callable[[Quantized], Array] = Quantized.dense
    for _ in range(layers):
        make = jax.vmap(make)
    return make(kernel)


def quantized_bytes(site: ProductSite, scheme: Scheme) -> int:
    """Return the bytes of one layer's kernel in a scheme, its scales and middles included."""
    inner, outer = site.sides
    numbers = {"int4": -(-inner // GROUP), "int8_asymmetric": 2}.get(scheme, 1)
    return inner * outer * BITS[scheme] // 8 + 4 * numbers * outer


def count_bytes(params: Any) -> int:
    """Return the bytes of parameters as they lie on a device."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def bits_per_weight(
    params: Any,
    products: Mapping[Path, ProductSite],
    scheme: Scheme,
    chosen: Collection[Path],
    *,
    wide: int = 16,
) -> float:
    """Return the mean bits of the weights of all products, if the `chosen` are quantised.

    Args:
      params: of the model; they tell how many layers a product has.
      products: all of them.
      scheme: of the chosen.
      chosen: paths.
      wide: bits of a weight that is not quantised.
    """
    flat: dict[Path, Any] = dict(flatten_dict(params))
    bits = weights = 0
    for path, site in products.items():
        count = flat[*path, KERNEL].size
        own = 8 * quantized_bytes(site, scheme) * count // prod(site.shape)
        bits, weights = bits + (own if path in chosen else wide * count), weights + count
    return bits / weights
