"""The public function and its implementation table."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain_call
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.linear_scan import hopper
from pallas_kernels.linear_scan.reference import linear_scan_reference
from pallas_kernels.linear_scan.xla import linear_scan_xla


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    # Import here: Pallas' GPU dialect takes over a second to import.
    from pallas_kernels.linear_scan.mosaic_gpu import linear_scan_mosaic_gpu

    return linear_scan_mosaic_gpu(*args, **options)


def _widened(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an implementation whose inputs are in the dtype of its sums."""

    def widened(a: Any, b: Any, *, initial: Any = None, reverse: bool = False) -> Any:
        dtype = jnp.float64 if jnp.float64 in (a.dtype, b.dtype) else jnp.float32
        wide = None if initial is None else initial.astype(dtype)
        return run(a.astype(dtype), b.astype(dtype), initial=wide, reverse=reverse)

    return widened


TABLE = (
    Implementation("mosaic_gpu", _mosaic_gpu, hopper.why_not, hopper.rather_not),
    Implementation("xla", _widened(linear_scan_xla)),
    Implementation("reference", _widened(linear_scan_reference)),
)
"""Implementations of the operation, fastest first."""

RANGES = {"a": Range()}
"""The ranges of arguments."""


@checked
def linear_scan(
    a: Float[Array, "*#S T D"],
    b: Float[Array, "*S T D"],
    *,
    initial: Float[Array, "*S D"] | None = None,
    reverse: bool = False,
    implementation: Literal["mosaic_gpu", "xla", "reference"] | None = None,
) -> Float[Array, "*S T D"]:
    """Run h_t = a_t h_{t-1} + b_t along the last axis but one, elementwise; return every h_t.

    Args:
      a: factors. Leading axes of size 1 are shared by the rows of b and are not copied.
      b: inputs.
      initial: h before the first step (after the last one with `reverse`); zero if None.
      reverse: run from the end, h_t = a_t h_{t+1} + b_t.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      h, in fp32 (f64 if a or b is), whatever the inputs' dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that is unknown or cannot run here.
    """
    _check(a, b, initial)
    check_values("linear_scan", RANGES, {"a": a})
    options = {"initial": initial, "reverse": reverse}
    chosen = choose("linear_scan", TABLE, implementation, current_device(), a, b, **options)
    return chosen.run(a, b, **options)


def explain(a: Any, b: Any, *, device: Device | None = None, **options: Any) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(linear_scan, device, a, b, **options)


def _check(a: Any, b: Any, initial: Any) -> None:
    for name, array in (("a", a), ("b", b), ("initial", initial)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"linear_scan: {name} must be floating point, got {array.dtype}: cast it first")
    if b.ndim < 2 or 0 in b.shape:
        raise ValueError(f"linear_scan: b must be [..., time, width], each at least 1, got shape {b.shape}")
    shared = a.ndim == b.ndim and all(x in (1, y) for x, y in zip(a.shape[:-2], b.shape[:-2], strict=True))
    if not shared or a.shape[-2:] != b.shape[-2:]:
        raise ValueError(
            f"linear_scan: a must have b's shape {b.shape}, or 1 in place of leading axes, got {a.shape}"
        )
    if initial is not None and initial.shape != (*b.shape[:-2], b.shape[-1]):
        raise ValueError(
            f"linear_scan: initial must be b without time, {(*b.shape[:-2], b.shape[-1])}, got {initial.shape}"
        )
