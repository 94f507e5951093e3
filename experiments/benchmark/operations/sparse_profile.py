"""Why attention to blocks takes its time, from profiles: python -m experiments.benchmark sparse_profile --out FILE.

A rule by blocks of `sparse_attention` runs three kernels. Of each this tells tiles, the time, and the rate over its
tiles beside the rate of dense attention. Where the rate is dense attention's, only the tiles are left to save.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from experiments.benchmark.figures.saved import save
from experiments.benchmark.operations.sparse_attention import Name, draw_blocks
from jaxblt.validation import number, whole

if TYPE_CHECKING:
    from jaxblt.profiling import KernelTotal, OpTotal

TRACED = 5
"""Calls in a trace."""

MOST = 16
"""Kernels that are named, the longest."""

PRODUCTS = {"attend": 2, "queries_gradient": 3, "keys_gradient": 4}
"""Products of a tile in each kernel: scores and outputs; scores, dp and dq; scores, dp, dv and dk."""


def sparse_profile(
    out: str = "runs/benchmark/sparse_profile.json",
    tokens: int = 32_768,
    heads: int = 32,
    head_dim: int = 128,
    blocks: tuple[int, ...] = (128, 64),
    densities: tuple[float, ...] = (0.1,),
    sparse: Name = "triton",
    dense: Name = "cudnn",
    layer: int = 65_536,
    predictor: int | None = None,
) -> dict[str, Any]:
    """Profile attention to random blocks, dense attention, and a whole layer that chooses blocks, in bf16.

    Args:
      out: JSON file to write.
      tokens, heads, head_dim: of one row; keys have as many heads.
      blocks: sizes of blocks.
      densities: of visible blocks, as shares of those of a causal mask.
      sparse, dense: implementations of `attention` with the rule and without.
      layer: tokens of the layer's row, which has four key heads and the defaults of `dynamic_layer`; 0 for none.
      predictor: hidden width of the networks by which the layer chooses blocks; None for pooled keys.

    Raises:
      ValueError: a size or a density means nothing.
    """
    sizes: dict[str, Any] = {"tokens": tokens, "heads": heads, "head_dim": head_dim}
    for name, value in (*sizes.items(), *(("blocks", size) for size in blocks)):
        whole(name, value, least=1)
    whole("layer", layer, least=0)
    for density in densities:
        number("densities", density, above=0, most=1)
    figures = sizes | {"sparse": sparse, "dense": dense}
    figures["dense_pass"] = found = _dense(tokens, heads, head_dim, dense)
    figures["calls"] = []
    for block, density in ((block, density) for block in blocks for density in densities):
        call = _call(tokens, heads, head_dim, draw_blocks(density, block, tokens), sparse, found)
        figures["calls"].append({"block": block, "density": density, **call})
        save("sparse_profile", out, figures)
    if layer:
        figures["layer"] = {"tokens": layer} | _layer(layer, heads, head_dim, predictor)
        save("sparse_profile", out, figures)
    return figures


def _dense(tokens: int, heads: int, head_dim: int, name: Name) -> dict[str, float]:
    """Return seconds and FLOP/s of dense causal attention: both products of the forward pass, and all five backward."""
    from pallas_kernels.attention import masks

    args = _arguments(tokens, heads, head_dim)
    forward, both = (
        sum(each.seconds for each in _trace(run, args)[1]) / TRACED
        for run in (_attend(masks.CAUSAL, name), _gradients(_attend(masks.CAUSAL, name)))
    )
    product = 2.0 * heads * head_dim * tokens * (tokens + 1) / 2
    return {
        "forward_seconds": forward,
        "backward_seconds": both - forward,
        "forward_rate": 2 * product / forward,
        "backward_rate": 5 * product / (both - forward) if both > forward else 0.0,
    }


def _call(
    tokens: int, heads: int, head_dim: int, mask: Any, name: Name, dense: dict[str, float]
) -> dict[str, Any]:
    """Return tiles, seconds and rates of the kernels, and what else ran in forward and backward pass."""
    _, launched = _trace(_gradients(_attend(mask, name)), _arguments(tokens, heads, head_dim))
    kernels: dict[str, Any] = {}
    for kernel, tiles in count_tiles(tokens, heads, head_dim, mask).items():
        seconds = sum(each.seconds for each in launched if kernel in each.name) / TRACED
        product = 2.0 * head_dim * tiles["pairs"]
        rate = PRODUCTS[kernel] * product / seconds if seconds else None
        side = dense["forward_rate" if kernel == "attend" else "backward_rate"]
        kernels[kernel] = {
            **tiles,
            "seconds": seconds,
            "rate": rate,
            "of_dense_rate": rate / side if rate and side else None,
        }
    rest = [each for each in launched if not any(kernel in each.name for kernel in PRODUCTS)]
    others = sum(each.seconds for each in rest) / TRACED
    return {"kernels": kernels, "other_seconds": others, "others": _named(rest)}


def count_tiles(tokens: int, heads: int, head_dim: int, mask: Any) -> dict[str, dict[str, float]]:
    """Return what the lists of each kernel hold.

    `live` are pairs of tiles of all heads, `pairs` their pairs of tokens; `partial` is the share that reads a mask,
    `hidden` that of their tokens which the mask hides. `longest` is the longest list in units of the mean; `programs`
    are as many as lists.
    """
    import jax

    from pallas_kernels.attention.triton_lists import find_tiles
    from pallas_kernels.attention.triton_why import make_plan
    from pallas_kernels.runtime import current_device

    x = jax.ShapeDtypeStruct((1, tokens, heads, head_dim), "bfloat16")
    plan = make_plan(current_device(), x, x, mask, None)
    found: dict[str, dict[str, float]] = {}
    for kernel, tile, by_key in zip(PRODUCTS, plan.kernels, (False, False, True), strict=True):
        tiles = find_tiles(plan.grid(tile, transposed=by_key), plan.rule)
        if isinstance(tiles, str):
            raise ValueError(f"tokens {tokens} in blocks: {tiles}")
        live, size = tiles.live.some, tile.rows * tile.columns
        lists, partly = live.sum(0 if by_key else 1), live & ~tiles.live.full
        shown = tiles.seen.reshape(len(tiles.seen), -1).mean(1)[tiles.numbers[partly]].sum()
        found[kernel] = {
            "rows": tile.rows,
            "columns": tile.columns,
            "live": float(heads * live.sum()),
            "pairs": float(heads * live.sum() * size),
            "partial": float(partly.sum() / live.sum()),
            "hidden": float((partly.sum() - shown) / live.sum()),
            "longest": float(lists.max() / lists.mean()),
            "programs": float(heads * len(lists)),
        }
    return found


def _layer(tokens: int, heads: int, head_dim: int, predictor: int | None) -> dict[str, Any]:
    """Return a layer's seconds by kernel, of the forward pass and of both."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.kernel_table import told
    from jaxblt.mixers import SparseAttentionConfig
    from pallas_kernels.runtime import reference_ops

    config = SparseAttentionConfig(
        heads * head_dim,
        num_heads=heads,
        num_kv_heads=max(heads // 8, 1),
        head_dim=head_dim,
        predictor=predictor,
    )
    module = config.build(dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (1, tokens, config.dim), jnp.bfloat16)
    with reference_ops():  # Compile no kernels for the shapes of parameters.
        params = jax.jit(module.init)(jax.random.key(1), x[:, :1])

    def run(params: Any, x: Any) -> Any:
        return module.apply(params, x)[0]

    passes = {"forward": run, "both": _gradients(run, (0, 1))}
    return {name: _longest(told(*_trace(each, (params, x)), TRACED)) for name, each in passes.items()}


def _longest(found: dict[str, Any]) -> dict[str, Any]:
    return {name: part[:MOST] if isinstance(part, list) else part for name, part in found.items()}


def _arguments(tokens: int, heads: int, head_dim: int) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    keys, size = jax.random.split(jax.random.key(0), 3), (1, tokens, heads, head_dim)
    return tuple(jax.random.normal(key, size, jnp.bfloat16) for key in keys)


def _attend(mask: Any, name: Name) -> Callable[..., Any]:
    from pallas_kernels.attention import attention

    return partial(attention, mask=mask, implementation=name)


def _gradients(run: Callable[..., Any], of: tuple[int, ...] = (0, 1, 2)) -> Callable[..., Any]:
    import jax

    return lambda *args: jax.grad(lambda *x: run(*x).astype("float32").sum(), of)(*args)


def _trace(run: Callable[..., Any], args: tuple[Any, ...]) -> "tuple[list[KernelTotal], list[OpTotal]]":
    """Return what `TRACED` calls ran on the device, by instruction and by the kernels' own names."""
    import jax

    from experiments.benchmark.figures.programs import SINGLY
    from jaxblt.profiling import kernel_totals, op_totals, trace

    # Launch one by one: a trace does not tell the kernels of a command buffer
    program = jax.jit(run).lower(*args).compile(compiler_options=SINGLY)
    jax.block_until_ready(program(*args))
    with tempfile.TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(TRACED):
                jax.block_until_ready(program(*args))
        return kernel_totals(folder, program.as_text() or ""), op_totals(folder)


def _named(launched: "Sequence[OpTotal]") -> list[dict[str, Any]]:
    """Return the longest of them, of one call."""
    return [
        {"name": each.name[:120], "count": each.count / TRACED, "seconds": each.seconds / TRACED}
        for each in launched[:MOST]
    ]
