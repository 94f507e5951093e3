"""Time the Triton kernels in other tiles: `python -m pallas_kernels.attention.tune --out tiles.json`.

A quarter of the causal blocks of 128 is visible, and each kernel runs alone. Put a tile that is ahead into
`triton_why.LARGE`.
"""

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels._dispatch import current_device
from pallas_kernels._measure import measure, this_machine
from pallas_kernels.attention import masks
from pallas_kernels.attention.rules import ByBlock, Custom, Interval
from pallas_kernels.attention.triton_gpu import _backward, _forward
from pallas_kernels.attention.triton_why import Plan, Tile, make_plan

CANDIDATES = {
    "forward": (
        Tile(128, 128, 8, 2),
        Tile(128, 128, 8, 3),
        Tile(128, 64, 8, 3),
        Tile(128, 64, 4, 2),
        Tile(64, 128, 4, 2),
        Tile(64, 64, 4, 2),
        Tile(64, 64, 4, 3),
    ),
    "queries": (
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 128, 8, 2),
        Tile(128, 32, 8, 2),
        Tile(64, 64, 4, 2),
    ),
    "keys": (
        Tile(128, 64, 8, 2),
        Tile(128, 64, 8, 3),
        Tile(128, 32, 8, 2),
        Tile(128, 32, 8, 3),
        Tile(64, 64, 4, 2),
        Tile(64, 32, 4, 2),
    ),
}
"""Tiles by kernel; none makes ptxas wait for single products, and few spill registers."""


def tune(
    module: str, heads: int, groups: int, lines: Callable[[int, int, int, int], Iterator[dict[str, Any]]]
) -> None:
    """Time all tiles of a module, print a line each, and write them to a JSON file.

    Args:
      module: which is run.
      heads, groups: of the call by default.
      lines: (tokens, heads, groups, size of a head) -> figures of each tile.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", default=f"runs/benchmark/{module.split('.')[-2]}_tiles.json")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--groups", type=int, default=groups)
    parser.add_argument("--head-dim", type=int, default=128)
    given = parser.parse_args()
    found: dict[str, Any] = {"machine": asdict(this_machine()), "call": vars(given), "tiles": []}
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for line in lines(given.tokens, given.heads, given.groups, given.head_dim):
        logging.info(line)
        found["tiles"].append(line)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def difference(found: Iterable[Array], right: Iterable[Array]) -> float:
    """Return the largest relative difference of arrays, in norm."""
    pairs = [(a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in zip(found, right, strict=True)]
    return max(float(jnp.linalg.norm((a - b).reshape(-1)) / jnp.linalg.norm(b.reshape(-1))) for a, b in pairs)


def _draw(q: Any, k: Any) -> Any:
    """Show a quarter of all blocks, drawn by a hash."""
    x = (q.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ (k.astype(np.uint32) * np.uint32(0x85EBCA6B))
    return ((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) >> np.uint32(30) == 0


def _lines(tokens: int, heads: int, groups: int, width: int) -> Iterator[dict[str, Any]]:
    """Yield the time of each tile, and how far its result is from that of the kernel's first one."""
    keys, sizes = jax.random.split(jax.random.key(0), 4), (heads, groups, groups, heads)
    q, k, v, do = (
        jax.random.normal(key, (1, tokens, n, width), jnp.bfloat16)
        for key, n in zip(keys, sizes, strict=True)
    )
    mask = masks.CAUSAL & ByBlock(Interval(0, 0) | Custom(_draw), 128)
    plan = make_plan(current_device(), q, k, mask, None)
    o, lse = jax.jit(partial(_forward, plan))(q, k, v, None, None)
    for kernel, tiles in CANDIDATES.items():
        right = None
        for tile in tiles:
            tiled = replace(plan, kernels=plan.kernels._replace(**{kernel: tile}))
            run, args = partial(_alone, kernel, tiled), (q, k, v, o, lse, do)
            got = jax.jit(run)(*args)
            right = got if right is None else right
            seconds = measure(run, *args).summary.median
            yield {
                "kernel": kernel,
                **tile._asdict(),
                "ms": 1e3 * seconds,
                "off": difference(got, right),
            }


def _alone(kernel: str, plan: Plan, q: Array, k: Array, v: Array, o: Array, lse: Array, do: Array) -> Any:
    """Return what one kernel makes; XLA leaves out the others."""
    if kernel == "forward":
        return _forward(plan, q, k, v, None, None)[:1]
    dq, dk, dv = _backward(plan, q, k, v, None, None, o, lse, do)
    return (dq,) if kernel == "queries" else (dk, dv)


if __name__ == "__main__":
    tune("pallas_kernels.attention.tune", 16, 16, _lines)
