"""Values by FFT where no derivative is taken; where one is, values and gradients by dense products.

Of few rows FFTs are the fastest forward, and dense products forward and backward together.
"""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import is_symbolic, vary_alike
from pallas_kernels._dispatch import Device
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.long_conv.hopper import FEW, ON_CHIP
from pallas_kernels.long_conv.monarch import long_conv_monarch, rather_not_monarch
from pallas_kernels.long_conv.xla import long_conv_xla


def long_conv_xla_or_monarch(
    x: Float[Array, "B D T"],
    filter: Float[Array, "D F"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    bias: Float[Array, "D"] | None = None,
    pre_gate: Float[Array, "B D T"] | None = None,
    post_gate: Float[Array, "B D T"] | None = None,
    causal: bool = True,
) -> Float[Array, "B D T"]:
    """Compute `long_conv` by Monarch products where they are faster, else by XLA's FFT."""
    arrays = vary_alike(x, filter, segment_ids, bias, pre_gate, post_gate)
    return _convolve(segment_alignment, causal, arrays)


def _named(alignment: int, causal: bool, arrays: tuple[Any, ...]) -> dict[str, Any]:
    names = ("x", "filter", "segment_ids", "bias", "pre_gate", "post_gate")
    return {**dict(zip(names, arrays, strict=True)), "segment_alignment": alignment, "causal": causal}


@partial(OwnGradient, nondiff_argnums=(0, 1))
def _convolve(alignment: int, causal: bool, arrays: tuple[Any, ...]) -> Any:
    return long_conv_xla(**_named(alignment, causal, arrays))


def _forward(alignment: int, causal: bool, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    return jax.vjp(lambda arrays: long_conv_monarch(**_named(alignment, causal, arrays)), arrays)


def _backward(alignment: int, causal: bool, vjp: Any, g: Array) -> tuple[Any, ...]:
    return vjp(g)


_convolve.defvjp(_forward, _backward)


def rather_not_xla_or_monarch(device: Device, x: Any, filter: Any, **options: Any) -> str | None:
    """Return why a later entry goes first, or None where both forms were timed and are faster."""
    rows, length = x.shape[0] * x.shape[1], x.shape[2]
    if is_symbolic(rows) or rows > FEW or length not in ON_CHIP:
        return f"it was timed with at most {FEW} rows of {ON_CHIP.start:,} to {ON_CHIP[-1]:,} steps"
    return rather_not_monarch(device, x, filter, **options)
