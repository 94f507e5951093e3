"""Time the kernels of chosen blocks in other tiles: `python -m pallas_kernels.attention.tune_chosen --out tiles.json`.

Each token chooses blocks before its own, drawn by chance. Put tiles that are ahead into `triton_gpu.FORWARD` and
`triton_gpu.BACKWARD`.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._measure import measure
from pallas_kernels.attention.chosen.triton_gpu import BACKWARD, FORWARD, Plan, Tile, _gradients, _keep
from pallas_kernels.attention.rules import Interval
from pallas_kernels.attention.tune import difference, tune

CANDIDATES = {
    "forward": (
        Tile(64, 4, 2, 4),
        Tile(64, 4, 3, 4),
        Tile(128, 4, 2, 4),
        Tile(128, 8, 2, 4),
        Tile(64, 4, 2, 8),
    ),
    "backward": (
        Tile(64, 8, 2, 4),
        Tile(64, 8, 3, 4),
        Tile(32, 4, 2, 4),
        Tile(32, 4, 3, 4),
        Tile(64, 8, 2, 8),
    ),
}
"""Tiles by kernel; none spills registers for heads of 128 in blocks of 64."""

COUNT, BLOCK = 16, 64
"""Blocks that a token chooses, and their keys."""


def _lines(tokens: int, heads: int, groups: int, width: int) -> Iterator[dict[str, Any]]:
    """Yield the time of each tile, merges and sorts included, and how far its result is from that of the first one."""
    keys, sizes = jax.random.split(jax.random.key(0), 5), (heads, groups, groups, heads)
    q, k, v, do = (
        jax.random.normal(key, (1, tokens, n, width), jnp.bfloat16)
        for key, n in zip(keys[:4], sizes, strict=True)
    )
    before = (jnp.arange(tokens, dtype=jnp.int32) // BLOCK)[None, None, :, None]
    share = jax.random.uniform(keys[4], (1, groups, tokens, COUNT)) * before.astype(jnp.float32)
    lists = jnp.where(before > 0, share.astype(jnp.int32), -1)
    plan = Plan(tokens, groups, BLOCK, Interval(after=0), width**-0.5, FORWARD, BACKWARD)
    _, kept = jax.jit(partial(_keep, plan))(q, k, v, lists, None, None)
    for kernel, tiles in CANDIDATES.items():
        right = None
        for tile in tiles:
            tiled = replace(plan, **{kernel: tile})
            run, args = _alone(kernel, tiled), (q, k, v, lists) if kernel == "forward" else (kept, do)
            got = jax.tree.leaves(jax.jit(run)(*args))
            right = got if right is None else right
            ms = 1e3 * measure(run, *args).summary.median
            yield {"kernel": kernel, **tile._asdict(), "ms": ms, "off": difference(got, right)}


def _alone(kernel: str, plan: Plan) -> Any:
    """Return one pass."""
    if kernel == "forward":
        return lambda q, k, v, lists: _keep(plan, q, k, v, lists, None, None)[0]
    return lambda kept, do: _gradients(plan, kept, do)[:3]


if __name__ == "__main__":
    tune("pallas_kernels.attention.tune_chosen", 32, 4, _lines)
