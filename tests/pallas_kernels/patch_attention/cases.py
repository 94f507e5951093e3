"""Calls of both directions on blocks of patches as segmentation makes them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.patch_attention import lookup, pool
from tests.pallas_kernels.op_suite import Arrays, OpCase


def patch_ids(rng: np.random.Generator, batch: int, blocks: int, size: int, capacity: int) -> np.ndarray:
    """Sorted ids: blocks with few patches (empty slots), one tail of padding, one block of padding alone."""
    starts = rng.random((batch, blocks, size)) < 0.9 * capacity / size
    starts[..., 0] = True
    ids = np.minimum(np.cumsum(starts, -1) - 1, capacity - 1)
    ids[0, 0, size - size // 4 :] = capacity
    ids[-1, -1] = capacity
    return ids


def pool_arrays(
    dtype: Any = jnp.float32, *, size: int = 29, capacity: int = 7, batch: int = 2, width: int = 5
) -> Arrays:
    rng = np.random.default_rng(size)
    heads, blocks = 2, 3

    def normal(length: int) -> Any:
        return jax.device_put(rng.standard_normal((batch, blocks, length, heads, width)).astype(dtype))

    ids = jax.device_put(patch_ids(rng, batch, blocks, size, capacity).astype(np.int32))
    return {"q": normal(capacity), "k": normal(size), "v": normal(size), "patch_ids": ids}


def lookup_arrays(
    dtype: Any = jnp.float32,
    *,
    look_back: int = 2,
    size: int = 29,
    capacity: int = 7,
    batch: int = 2,
    width: int = 5,
) -> Arrays:
    rng = np.random.default_rng(size + look_back)
    heads, blocks = 2, 3

    def normal(*shape: int) -> Any:
        return jax.device_put(rng.standard_normal(shape).astype(dtype))

    ids = patch_ids(rng, batch, blocks, size, capacity)
    # The patch before the byte's own: the carried ones, or none, for the first; none for padding.
    latest = np.where(ids == capacity, -1, ids + look_back - 1)
    latest[0, 1] -= look_back
    keys = (batch, blocks, look_back + capacity, heads, width)
    return {
        "q": normal(batch, blocks, size, heads, width),
        "k": normal(*keys),
        "v": normal(*keys),
        "latest": jax.device_put(latest.astype(np.int32)),
        "valid": jax.device_put(rng.random(keys[:3]) < 0.8),
        "bias": normal(heads, look_back),
    }


def pool_case(name: str, arrays: Arrays, run: Any) -> OpCase:
    """`run`: an implementation's name, or a function of the op's arguments."""
    call = partial(pool, implementation=run) if isinstance(run, str) else run
    ids, slots = np.asarray(arrays["patch_ids"]), arrays["q"].shape[2]
    empty = ~(ids[:, :, None, :] == np.arange(slots)[None, None, :, None]).any(-1)
    padding = ids == slots
    return OpCase(
        name=name,
        run=lambda a: call(**a),
        reference=lambda a: pool(**a, implementation="reference"),
        arrays=arrays,
        unused={"q": empty, "k": padding, "v": padding},
        silent=empty,
        terms=ids.shape[-1],
    )


def sees_any(latest: np.ndarray, valid: np.ndarray, look_back: int) -> np.ndarray:
    """Whether a byte has a valid patch in reach."""
    back = latest[..., None] - np.arange(valid.shape[2])
    return ((back >= 0) & (back < look_back) & valid[:, :, None]).any(-1)


def lookup_case(name: str, arrays: Arrays, run: Any) -> OpCase:
    """`run`: as of `pool_case`."""
    look_back = arrays["bias"].shape[1]
    call = partial(lookup, implementation=run) if isinstance(run, str) else run
    latest, valid = np.asarray(arrays["latest"]), np.asarray(arrays["valid"])
    return OpCase(
        name=name,
        run=lambda a: call(**a, look_back=look_back),
        reference=lambda a: lookup(**a, look_back=look_back, implementation="reference"),
        arrays=arrays,
        shared=frozenset({"bias"}),
        unused={"q": latest < 0, "k": ~valid, "v": ~valid},
        # Triton's kernel reads cotangents of bytes whose patches in reach are all invalid (docs/known-limits.md)
        silent=~sees_any(latest, valid, look_back) if isinstance(run, str) else latest < 0,
        terms=arrays["bias"].shape[1],
        grad_terms=arrays["latest"].size,
    )


def kernel_pools(run: Any) -> list[OpCase]:
    """A block and a tile end apart; patches longer than a tile of bytes; a batch of one block and a bit."""
    return [
        pool_case("pool", pool_arrays(jnp.bfloat16, size=150, capacity=36, width=64), run),
        pool_case("long patches", pool_arrays(jnp.bfloat16, size=301, capacity=4, width=64), run),
        pool_case("one slot", pool_arrays(jnp.bfloat16, size=9, capacity=1, width=64), run),
    ]


def kernel_lookups(run: Any) -> list[OpCase]:
    """Tiles of bytes that see few patches, many, and patches before their block."""
    return [
        lookup_case("lookup", lookup_arrays(jnp.bfloat16, size=150, capacity=36, width=64), run),
        lookup_case("one", lookup_arrays(jnp.bfloat16, look_back=1, size=90, capacity=90, width=64), run),
        lookup_case("eight", lookup_arrays(jnp.bfloat16, look_back=8, size=301, capacity=5, width=64), run),
    ]
