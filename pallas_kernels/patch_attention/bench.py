"""Both directions against plain gathers and segment sums: `python -m pallas_kernels.patch_attention.bench`.

Every block is full of patches of random lengths, nine in ten of its slots are in use, and the rest are holes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.patch_attention import lookup_xla, pool_xla, reference, triton_gpu
from pallas_kernels.patch_attention.shapes import SHAPES, PatchShape

LONGEST = 12
"""Bytes of the longest patch."""

FILLED = 0.9
"""Share of the slots that hold a patch."""

DENSE_BYTES = 2**33
"""Dense scores of all blocks take no more where the dense version is timed."""


@dataclass(frozen=True)
class Direction:
    """One direction at one shape."""

    name: str
    direction: Literal["pool", "lookup"]
    shape: PatchShape


CASES = tuple(Direction(f"{way}_{shape.name}", way, shape) for shape in SHAPES for way in ("pool", "lookup"))


def plan(case: Direction, *, interpret: bool = False) -> Plan:
    """Plan kernels, gathers and dense masks against `plain_pool` and `plain_lookup`, in bf16.

    Masks are planned where they fit.
    """
    shape, pool = case.shape, case.direction == "pool"
    args = pool_arguments(shape) if pool else lookup_arguments(shape)
    options = {} if pool else {"look_back": shape.look_back}
    dense = partial(reference.pool if pool else reference.lookup, **options)
    triton = partial(triton_gpu.pool if pool else triton_gpu.lookup, interpret=interpret, **options)
    unrolled = partial(pool_xla.pool if pool else lookup_xla.lookup, **options)
    versions = {"triton": triton, "xla": unrolled}
    if 4 * shape.heads * shape.capacity * args[1 if pool else 0][..., 0, 0].size <= DENSE_BYTES:
        versions["dense"] = dense
    read = float(sum(x.nbytes for x in args[:3]))
    result, seen = float(args[0].nbytes), 1 if pool else shape.look_back
    flops = 2.0 * seen * (args[1] if pool else args[0]).size
    return Plan(
        truth=Case("truth", _by_blocks(dense), args),
        plain=Case("plain", plain_pool if pool else plain_lookup, args),
        versions=[Case(name, fn, args) for name, fn in versions.items()],
        work={
            "forward": Work(2 * flops, read + result),
            # Count what backward moves: it reads q, k, v and the cotangent, and writes three gradients.
            "forward+backward": Work(7 * flops, 3 * read + 2 * result),
        },
    )


def pool_arguments(shape: PatchShape) -> tuple[Any, ...]:
    """Draw q, k, v, patch_ids."""
    return (*_streams(shape, shape.capacity, shape.block_size), jnp.asarray(patch_ids(shape)))


def lookup_arguments(shape: PatchShape) -> tuple[Any, ...]:
    """Draw q, k, v, latest, valid, bias."""
    ids = patch_ids(shape)
    latest, valid = latest_seen(shape, ids), filled_slots(shape, ids)
    bias = jax.random.normal(jax.random.key(2), (shape.heads, shape.look_back))
    streams = _streams(shape, shape.block_size, shape.look_back + shape.capacity)
    return (*streams, jnp.asarray(latest, jnp.int32), jnp.asarray(valid), bias)


def latest_seen(shape: PatchShape, ids: np.ndarray) -> np.ndarray:
    """Return each byte's latest patch [..., S] among the W + P: the last to end up to it."""
    closed = np.diff(ids, axis=-1, append=shape.capacity) > 0
    return ids - ~closed + shape.look_back


def filled_slots(shape: PatchShape, ids: np.ndarray) -> np.ndarray:
    """Return whether each of the W + P slots [...] holds a patch: those of earlier blocks do."""
    own = np.arange(shape.capacity) <= ids[..., -1:]
    return np.concatenate([np.ones((*ids.shape[:-1], shape.look_back), bool), own], -1)


def _streams(shape: PatchShape, queries: int, keys: int) -> tuple[Any, ...]:
    def stream(key: Any, length: int) -> Any:
        full = (shape.batch, shape.blocks, length, shape.heads, shape.head_dim)
        return jax.random.normal(key, full, jnp.bfloat16)

    split = jax.random.split(jax.random.key(1), 3)
    return tuple(stream(key, n) for key, n in zip(split, (queries, keys, keys), strict=True))


def patch_ids(shape: PatchShape) -> np.ndarray:
    """Draw slots [B, N, S] of bytes in patches of 1 to `LONGEST`.

    On average `FILLED` of the slots are in use.
    """
    mean = shape.block_size / (FILLED * shape.capacity)
    full = (shape.batch, shape.blocks, shape.block_size)
    lengths = 1 + np.random.default_rng(0).binomial(LONGEST - 1, (mean - 1) / (LONGEST - 1), full)
    ends = np.cumsum(lengths, -1).reshape(-1, shape.block_size)
    ids = [np.searchsorted(row, np.arange(shape.block_size), side="right") for row in ends]
    return np.minimum(np.stack(ids).reshape(full), shape.capacity - 1).astype(np.int32)


def plain_pool(q: Any, k: Any, v: Any, patch_ids: Any) -> Any:
    """Compute a softmax over segments, differentiated by JAX."""

    @jax.vmap
    @jax.vmap
    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        over = partial(jax.ops.segment_sum, num_segments=len(q), indices_are_sorted=True)
        scores = jnp.einsum("shk,shk->sh", q[ids], k, preferred_element_type=jnp.float32)
        scores *= q.shape[-1] ** -0.5
        top = jax.ops.segment_max(jax.lax.stop_gradient(scores), ids, len(q), indices_are_sorted=True)
        p = jnp.exp(scores - top[ids])
        p /= over(p, ids)[ids]
        return over(p[..., None] * v.astype(jnp.float32), ids).astype(q.dtype)

    return attend(q, k, v, patch_ids)


def plain_lookup(q: Any, k: Any, v: Any, latest: Any, valid: Any, bias: Any) -> Any:
    """Gather the keys and values that every byte sees; differentiated by JAX."""

    @jax.vmap
    @jax.vmap
    def attend(q: Any, k: Any, v: Any, latest: Any, valid: Any) -> Any:
        index = latest[:, None] - jnp.arange(bias.shape[1], dtype=latest.dtype)[None]
        seen = ((index >= 0) & valid[jnp.maximum(index, 0)])[:, None]
        scores = jnp.einsum("shk,swhk->shw", q, k[index], preferred_element_type=jnp.float32)
        p = jax.nn.softmax(scores * q.shape[-1] ** -0.5 + bias[None], where=seen).astype(v.dtype)
        return jnp.einsum("shw,swhk->shk", p, v[index])

    return attend(q, k, v, latest, valid)


def _by_blocks(dense: Callable[..., Any]) -> Callable[..., Any]:
    """Run block after block, made again for the gradient: one block's scores exist at a time."""

    def run(*args: Any) -> Any:
        shared = args[5:]  # the bias

        @jax.checkpoint
        def one(block: Any) -> Any:
            return dense(*(x[None, None] for x in block), *shared)[0, 0]

        blocks = [x.reshape(-1, *x.shape[2:]) for x in args[:5]]
        return jax.lax.map(one, blocks).reshape(args[0].shape)

    return run


if __name__ == "__main__":
    print(benchmark("patch_attention", CASES, plan))
