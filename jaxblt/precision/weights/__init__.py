"""Quantised weights: kernels of products in 8 or 4 bits, chosen and rounded after training.

`Linear` reads them in the place of its kernel, so models, decoding and answers need not know of them. Embeddings,
norms, biases, filters, routers and heads keep their dtype. Nothing here trains.
"""

from jaxblt.precision.weights.factors import quantize_factors
from jaxblt.precision.weights.kernel import (
    BITS,
    GROUP,
    SCHEMES,
    Quantized,
    Scheme,
    pack,
    quantize_kernel,
    unpack,
)
from jaxblt.precision.weights.products import (
    ProductSite,
    bits_per_weight,
    count_bytes,
    dense_params,
    find_products,
    has_quantized,
    is_stored,
    quantize,
    quantized_bytes,
    refuse_quantized,
)
from jaxblt.precision.weights.ranges import (
    CHOOSERS,
    Chooser,
    choose_range,
    input_scales,
    join_inputs,
    record_inputs,
)
from jaxblt.precision.weights.stored import from_stored, shapes_as_stored, to_stored

__all__ = [
    "BITS",
    "CHOOSERS",
    "GROUP",
    "SCHEMES",
    "Chooser",
    "ProductSite",
    "Quantized",
    "Scheme",
    "bits_per_weight",
    "choose_range",
    "count_bytes",
    "dense_params",
    "find_products",
    "from_stored",
    "has_quantized",
    "input_scales",
    "is_stored",
    "join_inputs",
    "pack",
    "quantize",
    "quantize_factors",
    "quantize_kernel",
    "quantized_bytes",
    "record_inputs",
    "refuse_quantized",
    "shapes_as_stored",
    "to_stored",
    "unpack",
]
