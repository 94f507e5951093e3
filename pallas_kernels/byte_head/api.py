"""The public functions of the byte head, and the tables of what runs them."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.byte_head import reference, xla

CROSS_ENTROPY_TABLE = (
    Implementation("xla", xla.cross_entropy),
    Implementation("reference", reference.cross_entropy),
)
"""Implementations of the cross entropy, fastest first."""
ENTROPY_TABLE = (Implementation("xla", xla.entropy), Implementation("reference", reference.entropy))
"""Fastest first."""


@checked
def cross_entropy(
    x: Float[Array, "*S T D"],
    head: Float[Array, "D V"],
    targets: Int[Array, "*S T"],
    *,
    implementation: Literal["xla", "reference"] | None = None,
) -> Float[Array, "*S T"]:
    """Return -log softmax(x head)[target] of each byte in nats, without keeping its logits.

    Sums are fp32, and so is the result; the head is rounded to x's dtype, its gradient is summed in fp32.

    Args:
      x: hidden states.
      head: a column for each id; a tied embedding's transpose.
      targets: the id that comes next, each in 0..V-1.
      implementation: which to run; the best for the device if None.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    _check("cross_entropy", x, head)
    if targets.shape != x.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"byte_head.cross_entropy: targets must be one integer a byte, of shape {x.shape[:-1]}, "
            f"got {targets.dtype} of shape {targets.shape}"
        )
    ids = Range(0, head.shape[1] - 1, "give the head a column for each id")
    check_values("byte_head.cross_entropy", {"targets": ids}, {"targets": targets})
    arrays = (x, head, targets)
    device = _dispatch.current_device()
    entry = _dispatch.choose("byte_head.cross_entropy", CROSS_ENTROPY_TABLE, implementation, device, *arrays)
    return entry.run(*arrays)


@checked
def entropy(
    x: Float[Array, "*S T D"],
    head: Float[Array, "D V"],
    *,
    implementation: Literal["xla", "reference"] | None = None,
) -> Float[Array, "*S T"]:
    """Return -sum_v p_v log p_v in nats with p = softmax(x head), without keeping the logits.

    Sums are fp32, and so is the result; the head is rounded to x's dtype, its gradient is summed in fp32.

    Args:
      x: hidden states.
      head: a column for each id; a tied embedding's transpose.
      implementation: which to run; the best for the device if None.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    _check("entropy", x, head)
    device = _dispatch.current_device()
    entry = _dispatch.choose("byte_head.entropy", ENTROPY_TABLE, implementation, device, x, head)
    return entry.run(x, head)


@checked
def explain(of: Literal["cross_entropy", "entropy"], *, device: Device | None = None) -> str:
    """Return which implementation runs, and why not the faster ones.

    It depends only on the device.

    Args:
      of: which of the two functions.
      device: what it would run on; this machine's default if None.
    """
    device = _dispatch.current_device() if device is None else device
    table = CROSS_ENTROPY_TABLE if of == "cross_entropy" else ENTROPY_TABLE
    return _dispatch.explain(f"byte_head.{of}", table, device)


def _check(of: str, x: Any, head: Any) -> None:
    if x.ndim < 2 or head.ndim != 2 or x.shape[-1] != head.shape[0] or 0 in x.shape + head.shape:
        raise ValueError(
            f"byte_head.{of}: expected x [..., T, D] and head [D, V], each axis at least 1, "
            f"got {x.shape} and {head.shape}"
        )
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in (x, head)):
        raise ValueError(
            f"byte_head.{of}: x and head must be floating point, got {x.dtype} and {head.dtype}: cast them first"
        )
