"""The public function and its implementation table."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import (
    Device,
    Implementation,
    choose,
    current_device,
    explain_call,
    has_reference_ops,
)
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.routed_lora import hopper
from pallas_kernels.routed_lora.hopper import STEP, TILE
from pallas_kernels.routed_lora.reference import Matrices, routed_lora_reference
from pallas_kernels.routed_lora.xla import is_small, routed_lora_xla


def _mosaic_gpu(*args: Any, **options: Any) -> Any:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.routed_lora.mosaic_gpu import routed_lora_mosaic_gpu

    return routed_lora_mosaic_gpu(*args, **options)


TABLE = (
    Implementation("mosaic_gpu", _mosaic_gpu, hopper.why_not, hopper.rather_not),
    Implementation("xla", routed_lora_xla),
    Implementation("reference", routed_lora_reference),
)
"""Implementations of the operation, fastest first."""

RANGES = {"code": Range()}
"""The ranges of arguments."""

Matrix = Float[Array, "_ _"]


@checked
def routed_lora(
    x: Float[Array, "B T K"],
    w: Matrix | Matrices | None,
    v: Matrix | Matrices,
    u: Matrix | Matrices,
    code: Float[Array, "B C E"] | None = None,
    *,
    chunk: int = 1,
    active: Bool[Array, "_ _"] | None = None,
    scale: float = 1.0,
    channels_first: bool = False,
    implementation: Literal["mosaic_gpu", "xla", "reference"] | None = None,
) -> Any:
    """Return y = x W + scale ((x V) * c) U for each site of a group that reads one x.

    Args:
      x: what all sites read; products are in its dtype and summed in fp32.
      w: [K, N] of each site; None for only the update, where x W is made in another way (quantised, for example).
      v: [K, r] of each site, or one array for one site, and likewise w and u. Other dtypes are cast to that of x.
      u: [r, N] of each site.
      code: token t has that of chunk t // chunk. Each of E numbers scales a block of r / E ranks. None for 1.
      chunk: tokens that share a code; C is the number of chunks of T tokens, the last one perhaps not full.
      active: [tiles, E], which blocks may have a number other than 0 in a tile, so that a kernel can skip the others.
        A tile is 256 tokens in the order of rows, the last one perhaps not full: tile i has the tokens 256 i to
        256 i + 255 of x.reshape(B T, K). The code counts as 0 where its block is not active, and has the gradient
        scale g p of any other number. `active_blocks` makes it of a code: then y and all gradients are as without it.
        None for all blocks.
      scale: of the update, alpha over the rank.
      channels_first: y is [B, N, T], channel-major, as convolutions take it.
      implementation: a name of the table; None takes the first that runs here.

    Returns:
      y of each site in the dtype of x, [B, T, N] or [B, N, T]: a tuple if v is one.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that is unknown or cannot run here.

    Source: Hu et al. (2106.09685), eq. 3, with a number between the two matrices for every rank.
    """
    weights, down, up = (a if a is None or isinstance(a, tuple) else (a,) for a in (w, v, u))
    sites: Any = (weights, down, up)
    _check(x, sites, code, chunk)
    _check_active(x, code, active)
    check_values("routed_lora", RANGES, {"code": code})
    options: dict[str, Any] = {
        "chunk": chunk,
        "scale": scale,
        "active": active,
        "channels_first": channels_first,
    }
    entry = choose("routed_lora", TABLE, implementation, current_device(), x, *sites, code, **options)
    found = entry.run(x, *sites, code, **options)
    return found if isinstance(v, tuple) else found[0]


def explain(
    x: Any, w: Any, v: Any, u: Any, code: Any = None, *, device: Device | None = None, **options: Any
) -> str:
    """Return which implementation runs for arrays or shapes on `device`, and why no faster one."""
    return explain_call(routed_lora, device, x, w, v, u, code, **options)


@checked
def can_skip(x: Any, w: Any, v: Any, u: Any, code: Any, *, channels_first: bool = False) -> bool:
    """Return whether `active` can save anything in such a call.

    It can if the kernel runs here and a site has several steps of ranks. Arguments are as in `routed_lora`, or
    ShapeDtypeStructs; w, v and u are tuples.
    """
    if code is None or has_reference_ops() or max(site.shape[1] for site in v) <= STEP:
        return False
    tiles = -(-x.shape[0] * x.shape[1] // TILE)
    active = jax.ShapeDtypeStruct((tiles, code.shape[2]), jnp.bool_)
    options: dict[str, Any] = {"active": active, "channels_first": channels_first}
    return TABLE[0].passed_over(current_device(), x, w, v, u, code, **options) is None


def can_join(x: Any, w: Any) -> bool:
    """Return whether such a call copies W.

    `join` and `multiply_joined` copy it once for many calls. Arguments are as in `routed_lora`, or ShapeDtypeStructs; w
    is a tuple.
    """
    return not has_reference_ops() and is_small(x, w)


def _check(x: Any, sites: tuple[Any, Any, Any], code: Any, chunk: int) -> None:
    w, v, u = sites
    for array in (x, *(w or ()), *v, *u, *([] if code is None else [code])):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"routed_lora: expected floats, got an array of {array.dtype}: cast it first")
    counts = [len(matrices) for matrices in sites if matrices is not None]
    if x.ndim != 3 or len(set(counts)) != 1 or not v:
        raise ValueError(
            f"routed_lora: expected x [B, T, K] and as many w as v and u, got x {x.shape} and {counts} matrices"
        )
    for i, (down, up) in enumerate(zip(v, u, strict=True)):
        given = [matrices[i].shape for matrices in sites if matrices is not None]
        rank, outputs = down.shape[-1], up.shape[-1]
        expected = [(x.shape[2], outputs)] * (w is not None) + [(x.shape[2], rank), (rank, outputs)]
        if given != expected:
            raise ValueError(
                f"routed_lora: w, v, u must be [K, N], [K, r], [r, N] with K = {x.shape[2]}, got {given}"
            )
        if not rank:
            raise ValueError(
                f"routed_lora: v {down.shape} and u {up.shape} have a rank of 0: use one of at least 1, or "
                "multiply by w alone"
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
    if not code.shape[2]:
        raise ValueError(
            f"routed_lora: code {code.shape} has no block: give it at least one number a token, or None for 1"
        )
    for down in v:
        if down.shape[1] % code.shape[2]:
            raise ValueError(
                f"routed_lora: a rank of {down.shape[1]} does not divide into the {code.shape[2]} blocks of the code"
            )


def _check_active(x: Any, code: Any, active: Any) -> None:
    if active is None:
        return
    if code is None:
        raise ValueError(
            f"routed_lora: active {active.shape} without a code, where every block counts 1: leave active out"
        )
    if active.dtype != jnp.bool_:
        raise ValueError(
            f"routed_lora: active must be booleans, got {active.dtype}: make it of the code by active_blocks"
        )
    tokens, blocks = x.shape[0] * x.shape[1], code.shape[2]
    expected = (-(-tokens // TILE), blocks)
    if active.shape != expected:
        raise ValueError(
            f"routed_lora: active must be {list(expected)} for {tokens} tokens in tiles of {TILE} and {blocks} blocks, "
            f"got {active.shape}: make it of the code by active_blocks"
        )
