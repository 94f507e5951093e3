"""Causal attention to some blocks against dense attention: python -m experiments.benchmark sparse_attention --out F.

Each block of queries sees itself and a share of the blocks before it: drawn by a hash, or every n-th. Rounds alternate.
Beside them stands the time in which the device makes the lists of live blocks, as it does if a mask reads arrays.
Before a density is timed its output at some queries of the whole row is compared with the reference in fp32.
"""

from functools import partial
from typing import Any, Literal

import numpy as np

from experiments.benchmark.figures.saved import save
from jaxblt.validation import number, whole

Name = Literal["cudnn", "triton", "xla", "reference"]
Kind = Literal["random", "strided"]

CHECKED = 128
"""Queries, from the first to the last, whose output is compared with the reference, which holds all their scores."""

WITHIN = 2.0**-7
"""Relative error, in norm, of a bf16 result that passes."""


def sparse_attention(
    out: str = "runs/benchmark/sparse_attention.json",
    tokens: int = 32_768,
    heads: int = 32,
    head_dim: int = 128,
    block: int = 128,
    densities: tuple[float, ...] = (0.5, 0.25, 0.1),
    kind: Kind = "random",
    sparse: Name = "xla",
    dense: Name = "cudnn",
) -> dict[str, Any]:
    """Compare milliseconds, forward and with gradients, in bf16.

    Args:
      out: JSON file to write.
      tokens, heads, head_dim: of one row; keys have as many heads.
      block: tokens in a block.
      densities: of visible blocks, as shares of those of a causal mask. At 1 `attention` drops the rule.
      kind: of the blocks that are seen; "strided" takes the n-th ones, n the nearest to 1 / density.
      sparse, dense: implementations of `attention` with the rule and without.

    Raises:
      RuntimeError: an output differs from the reference.
      ValueError: a size or a density means nothing.
    """
    for name, value in (("tokens", tokens), ("heads", heads), ("head_dim", head_dim), ("block", block)):
        whole(name, value, least=1)
    for density in densities:
        number("densities", density, above=0, most=1)
    figures: dict[str, Any] = {
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "block": block,
        "kind": kind,
        "sparse": sparse,
        "dense": dense,
        "calls": [],
    }
    for density in densities:
        mask = draw_blocks(density, block, tokens) if kind == "random" else every_nth(density, block)
        error = _error(tokens, heads, head_dim, mask, sparse)
        times = {
            name: _time(name, tokens, heads, head_dim, mask, sparse, dense) for name in ("forward", "both")
        }
        figures["calls"].append(
            {
                "density": density,
                **shares(mask, tokens),
                "error": error,
                **times,
                "lists": _time_lists(mask, tokens, heads, head_dim, times["forward"]["ms"]["sparse"]),
            }
        )
        save("sparse_attention", out, figures)
    return figures


def draw_blocks(density: float, block: int, tokens: int) -> Any:
    """Return the causal mask in which a share of the blocks is visible, those of the diagonal always."""
    from pallas_kernels.attention import masks
    from pallas_kernels.attention.rules import ByBlock, Custom, Interval

    count = -(-tokens // block)
    # Leave room for the diagonal: it is 2 / (count + 1) of the causal blocks.
    drawn = max(density * (count + 1) - 2, 0) / max(count - 1, 1)
    limit = np.uint32(min(drawn, 1.0) * (2**32 - 1))

    def draw(q: Any, k: Any) -> Any:
        x = (q.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ (k.astype(np.uint32) * np.uint32(0x85EBCA6B))
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return (x ^ (x >> np.uint32(16))) <= limit

    return masks.CAUSAL & ByBlock(Interval(0, 0) | Custom(draw), block)


def every_nth(density: float, block: int) -> Any:
    """Return the causal mask in which a block sees itself and every n-th block before it."""
    from pallas_kernels.attention import masks
    from pallas_kernels.attention.rules import ByBlock, Strided

    return masks.CAUSAL & ByBlock(Strided(round(1 / density)), block)


def shares(mask: Any, tokens: int) -> dict[str, float]:
    """Return what is visited under a causal mask by blocks, as shares of what the causal mask alone visits.

    `longest` is the blocks of the longest row, in units of the mean.
    """
    size, count = mask.rule.size, -(-tokens // mask.rule.size)
    number = np.arange(count, dtype=np.int32)
    seen = np.tril(np.asarray(mask.rule.rule.sees(number[:, None], number[None])))
    rows, own = seen.sum(1), seen.diagonal()
    # Count half of a pair of blocks on the diagonal, where the causal mask cuts it.
    pairs = size**2 * (rows.sum() - own.sum()) + size * (size + 1) / 2 * own.sum()
    return {
        "blocks": float(rows.sum() / (count * (count + 1) / 2)),
        "pairs": float(pairs / (count * size * (count * size + 1) / 2)),
        "longest": float(rows.max() / rows.mean()),
    }


def _arguments(tokens: int, heads: int, head_dim: int) -> list[Any]:
    import jax
    import jax.numpy as jnp

    keys, size = jax.random.split(jax.random.key(0), 3), (1, tokens, heads, head_dim)
    return [jax.random.normal(key, size, jnp.bfloat16) for key in keys]


def _error(tokens: int, heads: int, head_dim: int, mask: Any, sparse: Name) -> float:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention import attention, masks

    def run(name: Name, mask: Any, *args: Any) -> Any:
        return np.asarray(jax.jit(partial(attention, mask=mask, implementation=name))(*args), np.float64)

    q, k, v = _arguments(tokens, heads, head_dim)
    sample = np.linspace(0, tokens - 1, min(tokens, CHECKED)).astype(np.int32)
    places = masks.positions(
        *(jnp.asarray(each[None]) for each in (sample, np.arange(tokens, dtype=np.int32)))
    )
    got = run(sparse, mask, q, k, v)[:, sample]
    right = run("reference", mask & places, *(x.astype("float32") for x in (q[:, sample], k, v)))
    error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
    if not error <= WITHIN:
        raise RuntimeError(f"{sparse} is off the reference by {error:.2e}, {WITHIN:.2e} is allowed")
    return error


def _time(
    which: str, tokens: int, heads: int, head_dim: int, mask: Any, sparse: Name, dense: Name
) -> dict[str, Any]:
    """Time both sides of a pass, and return the dense one's time over the sparse one's with its 95 % interval, too."""
    import jax

    from pallas_kernels.attention import attention, masks
    from pallas_kernels.runtime import Case, compare

    def side(mask: Any, name: Name) -> Any:
        run = partial(attention, mask=mask, implementation=name)
        if which == "forward":
            return run
        return lambda *args: jax.grad(lambda *x: run(*x).astype("float32").sum(), (0, 1, 2))(*args)

    args = tuple(_arguments(tokens, heads, head_dim))
    sides = (("dense", side(masks.CAUSAL, dense)), ("sparse", side(mask, sparse)))
    found = compare(*(Case(name, fn, args) for name, fn in sides))
    ms = {each.name: 1e3 * each.summary.median for each in (found.first, found.second)}
    return {"ms": ms, "dense_over_sparse": {"value": found.ratio, "low": found.low, "high": found.high}}


def _time_lists(mask: Any, tokens: int, heads: int, head_dim: int, forward_ms: float) -> dict[str, float]:
    """Time the lists of the Triton kernels' forward pass, made from documents on the device; and their share of it."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention.triton_lists import find_tiles, make_lists
    from pallas_kernels.attention.triton_why import make_plan
    from pallas_kernels.runtime import Case, current_device, measure_all

    x = jax.ShapeDtypeStruct((1, tokens, heads, head_dim), "bfloat16")
    plan = make_plan(current_device(), x, x, mask, None)
    grid = plan.grid(plan.kernels.forward)
    tiles = find_tiles(grid, plan.rule)
    if isinstance(tiles, str):
        raise ValueError(f"tokens {tokens} in blocks: {tiles}")
    ids = jnp.ones((tokens,), jnp.int32)
    (found,) = measure_all([Case("lists", lambda ids: make_lists(grid, tiles, ids, ids), (ids,))])
    ms = 1e3 * found.summary.median
    return {"ms": ms, "share_of_forward": ms / forward_ms}
