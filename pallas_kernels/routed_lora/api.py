"""The public function and its implementation table."""

from typing import Any, Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._dispatch import Device, Implementation, choose, current_device
from pallas_kernels._dispatch import explain as explain_table
from pallas_kernels.routed_lora.reference import Matrices, routed_lora_reference
from pallas_kernels.routed_lora.xla import routed_lora_xla

TABLE = (Implementation("xla", routed_lora_xla), Implementation("reference", routed_lora_reference))
"""Implementations of the operation, fastest first."""

Matrix = Float[Array, "_ _"]
Named = Literal["xla", "reference"] | None


@overload
def routed_lora(
    x: Array,
    w: Array,
    v: Array,
    u: Array,
    code: Array | None = None,
    *,
    chunk: int = ...,
    scale: float = ...,
    implementation: Named = ...,
) -> Array: ...
@overload
def routed_lora(
    x: Array,
    w: tuple[Array, ...],
    v: tuple[Array, ...],
    u: tuple[Array, ...],
    code: Array | None = None,
    *,
    chunk: int = ...,
    scale: float = ...,
    implementation: Named = ...,
) -> tuple[Array, ...]: ...
def routed_lora(
    x: Float[Array, "B T K"],
    w: Matrix | Matrices,
    v: Matrix | Matrices,
    u: Matrix | Matrices,
    code: Float[Array, "B C E"] | None = None,
    *,
    chunk: int = 1,
    scale: float = 1.0,
    implementation: Literal["xla", "reference"] | None = None,
) -> Float[Array, "B T N"] | tuple[Float[Array, "B T _"], ...]:
    """y = x W + scale ((x V) * c) U for each site of a group that reads one x.

    Args:
      x: what all sites read; products are in its dtype and summed in fp32.
      w: [K, N] of each site, or one array for one site, and likewise v and u. Other dtypes are cast to that of x.
      v: [K, r] of each site.
      u: [r, N] of each site.
      code: token t has that of chunk t // chunk. Each of E numbers scales a block of r / E ranks. None for 1.
      chunk: tokens that share a code; C is the number of chunks of T tokens, the last one perhaps not full.
      scale: of the update, alpha over the rank.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y of each site in the dtype of x, [B, T, N]: a tuple if w is one.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that is unknown.

    Source: Hu et al. (2106.09685), eq. 3, with a number between the two matrices for every rank.
    """
    sites = tuple(a if isinstance(a, tuple) else (a,) for a in (w, v, u))
    _check(x, sites, code, chunk)
    options: dict[str, Any] = {"chunk": chunk, "scale": scale}
    entry = choose("routed_lora", TABLE, implementation, current_device(), x, *sites, code, **options)
    found = entry.run(x, *sites, code, **options)
    return found if isinstance(w, tuple) else found[0]


def explain(
    x: Any, w: Any, v: Any, u: Any, code: Any = None, *, device: Device | None = None, **options: Any
) -> str:
    """Which implementation runs for these arrays (or ShapeDtypeStructs) on `device`, and why no faster one."""
    return explain_table("routed_lora", TABLE, device or current_device(), x, w, v, u, code, **options)


def _check(x: Any, sites: tuple[Any, Any, Any], code: Any, chunk: int) -> None:
    w, v, u = sites
    for array in (x, *w, *v, *u, *([] if code is None else [code])):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"routed_lora: expected floats, got an array of {array.dtype}: cast it first")
    if x.ndim != 3 or not len(w) == len(v) == len(u) >= 1:
        raise ValueError(
            f"routed_lora: expected x [B, T, K] and as many w as v and u, got x {x.shape} and {len(w)}, {len(v)}, "
            f"{len(u)} matrices"
        )
    for weight, down, up in zip(w, v, u, strict=True):
        fits = (x.shape[2], weight.shape[-1]) == weight.shape
        if not (
            fits and down.shape == (x.shape[2], up.shape[0]) and up.shape == (down.shape[1], weight.shape[1])
        ):
            raise ValueError(
                f"routed_lora: w, v, u must be [K, N], [K, r], [r, N] with K = {x.shape[2]}, got {weight.shape}, "
                f"{down.shape}, {up.shape}"
            )
    _check_code(x, v, code, chunk)


def _check_code(x: Any, v: Any, code: Any, chunk: int) -> None:
    if chunk < 1:
        raise ValueError(
            f"routed_lora: chunk must be at least 1, got {chunk}: it counts the tokens of a code"
        )
    if code is None:
        return
    expected = (x.shape[0], -(-x.shape[1] // chunk))
    if code.ndim != 3 or code.shape[:2] != expected:
        raise ValueError(
            f"routed_lora: code must be {[*expected, 'E']} for x {x.shape} in chunks of {chunk}, got {code.shape}"
        )
    for down in v:
        if down.shape[1] % code.shape[2]:
            raise ValueError(
                f"routed_lora: a rank of {down.shape[1]} does not divide into the {code.shape[2]} blocks of the code"
            )
