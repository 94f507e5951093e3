"""cuDNN and Triton against blocks in XLA: `python -m pallas_kernels.attention.bench`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._dispatch import current_device
from pallas_kernels._measure import Case
from pallas_kernels.attention import masks
from pallas_kernels.attention.api import attention
from pallas_kernels.attention.shapes import SHAPES, AttentionShape
from pallas_kernels.attention.triton_why import why_not

DENSE_BYTES = 2**33
"""Dense scores take no more where the reference is timed."""


def plan(shape: AttentionShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Time cuDNN and Triton on a GPU, and the reference where its scores fit, against XLA's blocks.

    The truth is XLA's in fp32.
    """
    args = arguments(shape, dtype)
    names = ["cudnn"] * (current_device().platform == "gpu")
    mask = masks.band(shape.causal, shape.window) & masks.documents(args[3] if args[3:] else None)
    names += ["triton"] * (why_not(current_device(), args[0], args[1], args[2], mask) is None)
    names += ["reference"] * (4 * shape.batch * shape.heads * shape.tokens**2 <= DENSE_BYTES)
    flops = 2.0 * shape.heads * shape.head_dim * visible_pairs(shape)
    stored, result = float(sum(x.nbytes for x in args[:3])), float(args[0].nbytes)
    return Plan(
        truth=Case("truth", partial(_in_fp32, shape), args),
        plain=Case("xla", partial(_attend, shape, "xla"), args),
        versions=[Case(name, partial(_attend, shape, name), args) for name in names],
        work={
            "forward": Work(2 * flops, stored + result),
            # Backward reads q, k, v, o and the cotangent, and writes three gradients.
            "forward+backward": Work(7 * flops, 3 * stored + 3 * result),
        },
    )


def arguments(shape: AttentionShape, dtype: Any) -> tuple[Any, ...]:
    """Return q, k, v, and segment ids where rows hold several documents."""
    keys = jax.random.split(jax.random.key(1), 3)
    sizes = [
        (shape.batch, shape.tokens, n, shape.head_dim) for n in (shape.heads, shape.groups, shape.groups)
    ]
    arrays = tuple(jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True))
    return arrays if shape.documents == 1 else (*arrays, jnp.asarray(segment_ids(shape)))


def segment_ids(shape: AttentionShape) -> np.ndarray:
    """Return ids [B, T] of documents whose ends are drawn evenly."""
    rng = np.random.default_rng(0)
    ends = [rng.choice(np.arange(1, shape.tokens), shape.documents - 1, False) for _ in range(shape.batch)]
    rows = [1 + np.searchsorted(np.sort(row), np.arange(shape.tokens), side="right") for row in ends]
    return np.stack(rows).astype(np.int32)


def visible_pairs(shape: AttentionShape) -> int:
    """Count the pairs of a query and a key that it sees, in all rows."""
    ids = segment_ids(shape) if shape.documents > 1 else np.ones((shape.batch, shape.tokens), np.int32)
    lengths = np.concatenate([np.unique(row, return_counts=True)[1] for row in ids]).astype(np.int64)
    reach = shape.tokens if shape.window is None else shape.window
    if not shape.causal:
        if shape.window is not None:
            raise ValueError(f"two-sided windows are not counted: make {shape.name!r} causal")
        return int(np.sum(lengths**2))
    full = np.minimum(lengths, reach)
    return int(np.sum(full * (full + 1) // 2 + (lengths - full) * reach))


def _attend(shape: AttentionShape, implementation: Any, q: Any, k: Any, v: Any, ids: Any = None) -> Any:
    mask = masks.band(shape.causal, shape.window) & masks.documents(ids)
    return attention(q, k, v, mask, implementation=implementation)


def _in_fp32(shape: AttentionShape, q: Any, k: Any, v: Any, ids: Any = None) -> Any:
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        return _attend(shape, "xla", wide[0], wide[1], wide[2], ids).astype(q.dtype)


if __name__ == "__main__":
    print(benchmark("attention", SHAPES, plan))
