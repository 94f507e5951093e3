"""The public functions of patch attention, and the tables of what runs them."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Device, Implementation
from pallas_kernels._ranges import Range, check_values
from pallas_kernels.patch_attention import lookup_xla, pool_xla, reference
from pallas_kernels.patch_attention.triton_why import why_not


def _pool_triton(*args: Any) -> Array:
    """Import the kernel where it runs: Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.patch_attention import triton_gpu

    return triton_gpu.pool(*args)


def _lookup_triton(*args: Any, look_back: int, distances: None = None) -> Array:
    del distances  # `why_not` takes none
    from pallas_kernels.patch_attention import triton_gpu

    return triton_gpu.lookup(*args, look_back=look_back)


POOL_TABLE = (
    Implementation("triton", _pool_triton, why_not),
    Implementation("xla", pool_xla.pool),
    Implementation("reference", reference.pool),
)
LOOKUP_TABLE = (
    Implementation("triton", _lookup_triton, why_not),
    Implementation("xla", lookup_xla.lookup),
    Implementation("reference", reference.lookup),
)
"""Fastest first."""


@checked
def pool(
    q: Float[Array, "B N P H K"],
    k: Float[Array, "B N S H K"],
    v: Float[Array, "B N S H K"],
    patch_ids: Int[Array, "B N S"],
    *,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> Float[Array, "B N P H K"]:
    """Attend from each patch to its own bytes.

    o_p = sum_{s: id_s = p} softmax_s(q_p.k_s / sqrt(K)) v_s. Softmax and sums are fp32. A slot without bytes gives 0;
    what padding bytes and such slots hold is not read.

    Args:
      q: a query for each of the P patch slots of the N blocks of each row.
      k: keys of the S bytes of each block.
      v: their values.
      patch_ids: the slot of each byte's patch; within a block they do not fall, P means padding.
      implementation: which to run; the best for the device if None.

    Raises:
      ValueError: shapes or dtypes do not fit together, or the implementation cannot run here.
    """
    if q.ndim != 5 or k.shape != v.shape or k.shape[:2] + k.shape[3:] != q.shape[:2] + q.shape[3:]:
        raise ValueError(
            f"expected q [B, N, P, H, K], k, v [B, N, S, H, K], got {q.shape}, {k.shape}, {v.shape}"
        )
    if patch_ids.shape != k.shape[:3]:
        raise ValueError(f"patch_ids must name the patch of each byte, {k.shape[:3]}, got {patch_ids.shape}")
    _check_dtypes(q, k, v)
    slots = Range(0, q.shape[2], "a block has that many slots for patches, and one number more is padding")
    check_values("patch_attention.pool", {"patch_ids": slots}, {"patch_ids": patch_ids})
    device = _dispatch.current_device()
    entry = _dispatch.choose("patch_attention.pool", POOL_TABLE, implementation, device, q, k, v, patch_ids)
    return entry.run(q, k, v, patch_ids)


@checked
def lookup(
    q: Float[Array, "B N S H K"],
    k: Float[Array, "B N M H K"],
    v: Float[Array, "B N M H K"],
    latest: Int[Array, "B N S"],
    valid: Bool[Array, "B N M"],
    bias: Float[Array, "H W"],
    *,
    look_back: int,
    distances: tuple[int, ...] | None = None,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> Float[Array, "B N S H K"]:
    """Attend from each byte to the W latest patches, or to W at other distances.

    Keys are m = latest - d_i, i < W, with score q.k_m / sqrt(K) + bias_i. Softmax and sums are fp32. A byte that sees
    no patch gives 0; invalid keys are not read.

    Args:
      q: queries of the S bytes of each of N blocks.
      k: keys of M = W + P patches: W carried over from before the block, then its own slots.
      v: their values.
      latest: index among the M of the latest patch each byte sees; it does not fall within a block, but is negative
        for bytes that see none, before or after the others.
      valid: which of the M hold a patch that may be seen.
      bias: added to the scores of each head at distance i.
      look_back: W.
      distances: the W different d_i, negative ones ahead; None for 0, 1, .. W - 1.
      implementation: which to run; the best for the device if None.

    Raises:
      ValueError: shapes or dtypes do not fit together, or the implementation cannot run here.
    """
    if q.ndim != 5 or k.shape != v.shape or k.shape[:2] + k.shape[3:] != q.shape[:2] + q.shape[3:]:
        raise ValueError(
            f"expected q [B, N, S, H, K], k, v [B, N, M, H, K], got {q.shape}, {k.shape}, {v.shape}"
        )
    if latest.shape != q.shape[:3] or valid.shape != k.shape[:3]:
        expected = f"latest {q.shape[:3]} (one index a byte) and valid {k.shape[:3]} (one flag a key)"
        raise ValueError(f"expected {expected}, got {latest.shape} and {valid.shape}")
    if look_back < 1 or bias.shape != (q.shape[3], look_back):
        expected = f"look_back >= 1 and bias [H = {q.shape[3]}, look_back]"
        raise ValueError(f"expected {expected}, got look_back = {look_back} and bias of shape {bias.shape}")
    if distances is not None and (len(distances) != look_back or len(set(distances)) != look_back):
        raise ValueError(f"expected look_back = {look_back} different distances, got {distances}")
    _check_dtypes(q, k, v)
    ranges = {"latest": Range(most=k.shape[2] - 1, fix="it counts keys"), "bias": Range()}
    check_values("patch_attention.lookup", ranges, {"latest": latest, "bias": bias})
    arrays = (q, k, v, latest, valid, bias)
    device = _dispatch.current_device()
    options = {"look_back": look_back, "distances": distances}
    entry = _dispatch.choose(
        "patch_attention.lookup", LOOKUP_TABLE, implementation, device, *arrays, **options
    )
    return entry.run(*arrays, **options)


@checked
def explain(
    direction: Literal["pool", "lookup"], *arrays: Any, device: Device | None = None, **options: Any
) -> str:
    """Return which implementation runs, and why not the faster ones.

    Args:
      direction: "pool" (patches over bytes) or "lookup" (bytes over patches).
      arrays: of the call, or their ShapeDtypeStructs; without them only the device is looked at.
      options: of the call.
      device: what it would run on; this machine's default if None.
    """
    operation, table = (pool, POOL_TABLE) if direction == "pool" else (lookup, LOOKUP_TABLE)
    if arrays or options:
        return _dispatch.explain_call(operation, device, *arrays, **options)
    device = _dispatch.current_device() if device is None else device
    return _dispatch.explain(f"patch_attention.{direction}", table, device)


def _check_dtypes(q: Array, k: Array, v: Array) -> None:
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q, k, v must have one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first"
        )
