"""Checks of the arguments that ops with a matrix of state per head take alike."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels._ranges import Range

LOG_GATE = Range(
    most=0,
    fix="pass the logarithm of a gate in 0..1, such as log_sigmoid(x)",
    per_token=True,
    finite=False,
)
"""The range of logarithms of gates."""


def check_heads(op: str, q: Any, k: Any, v: Any) -> None:
    """Raise ValueError for queries, keys and values that do not fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{op}: {name} must be [batch, time, heads, width], each at least 1, got {x.shape}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {x.dtype}: cast it first")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{op}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape != k.shape:
        raise ValueError(f"{op}: q and k must have one shape, got {q.shape} and {k.shape}")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"{op}: v must have the batch and time of k, {k.shape[:2]}, got {v.shape[:2]}")
    if v.shape[2] % k.shape[2]:
        raise ValueError(
            f"{op}: the heads of v must be a multiple of those of k, {k.shape[2]}, got {v.shape[2]}"
        )


def check_gates(op: str, expected: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Raise ValueError for an array that is not floating point or has another shape."""
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"{op}: {name} must have shape {shape}, got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{op}: {name} must be floating point, got {x.dtype}: cast it first")


def check_rows(op: str, v: Any, segment_ids: Any, chunk_size: int) -> None:
    """Raise ValueError for ids that are no integers [B, T], or chunks that are no power of two."""
    if segment_ids is not None:
        if segment_ids.shape != v.shape[:2]:
            raise ValueError(f"{op}: segment_ids must have shape {v.shape[:2]}, got {segment_ids.shape}")
        if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(f"{op}: segment_ids must be integers, got {segment_ids.dtype}: cast them first")
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"{op}: chunk_size must be a power of two, got {chunk_size}")
