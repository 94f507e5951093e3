"""A layer whose tokens choose blocks against a dense layer: python -m experiments.benchmark dynamic_layer --out F.

Both are whole layers with projections, of one document a row, and of one width. Rounds alternate. The branches are
timed alone beside them. Before that, attention to chosen blocks is compared with the reference in fp32.
"""

from functools import partial
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from jaxblt.validation import whole

CHECKED = 1024
"""Tokens over which attention to chosen blocks is compared with the reference, which holds all scores."""

WITHIN = 2.0**-7
"""Relative error, in norm, of a bf16 result that passes."""


def dynamic_layer(
    out: str = "runs/benchmark/dynamic_layer.json",
    tokens: tuple[int, ...] = (16_384, 65_536),
    heads: int = 32,
    groups: int = 4,
    head_dim: int = 128,
    block: int = 64,
    top_k: int = 16,
    window: int = 512,
    predictor: int | None = None,
    parts: bool = True,
) -> dict[str, Any]:
    """Compare milliseconds of `SparseAttentionConfig` and of causal `AttentionConfig`, forward and with gradients.

    Args:
      out: JSON file to write.
      tokens: lengths of one row; inputs are drawn, so neighbours choose unlike blocks, the worst case of all.
      heads, groups, head_dim: query heads, key heads and their size; a layer is heads * head_dim wide.
      block, top_k, window: of the sparse layer.
      predictor: hidden width of the networks by which it chooses blocks; None for pooled keys.
      parts: time the branches alone, too.

    Raises:
      RuntimeError: attention to chosen blocks differs from the reference.
      ValueError: a size means nothing.
    """
    sizes = {"heads": heads, "groups": groups, "head_dim": head_dim}
    sizes |= {"block": block, "top_k": top_k, "window": window}
    for name, value in [*sizes.items(), *(("tokens", length) for length in tokens)]:
        whole(name, value, least=1)
    figures: dict[str, Any] = {**sizes, "predictor": predictor, "error": _error(**sizes), "calls": []}
    for length in tokens:
        found = {"tokens": length, **_compare(length, **sizes, predictor=predictor)}
        figures["calls"].append(found | ({"parts": _time_parts(length, **sizes)} if parts else {}))
        save("dynamic_layer", out, figures)
    return figures


def _compare(length: int, *, heads: int, groups: int, head_dim: int, **sparse: Any) -> dict[str, Any]:
    """Time both layers, forward and with gradients of parameters and inputs; say what runs attention."""
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers import AttentionConfig, SparseAttentionConfig
    from jaxblt.profiling import Case, compare, compiled, forward_backward
    from pallas_kernels.runtime import record_choices, reference_ops

    shared: dict[str, Any] = {"dim": heads * head_dim, "num_heads": heads, "num_kv_heads": groups}
    shared |= {"head_dim": head_dim}
    x = jax.random.normal(jax.random.key(0), (1, length, heads * head_dim), jnp.bfloat16)

    def case(name: str, config: Any) -> Case:
        layer = config.build(dtype=jnp.bfloat16)
        with reference_ops():  # Compile no kernels for the shapes of parameters.
            params = jax.jit(layer.init)(jax.random.key(1), x[:, :1])
        return Case(name, lambda params, x: layer.apply(params, x)[0], (params, x))

    forward = [
        case("dense", AttentionConfig(**shared)),
        case("sparse", SparseAttentionConfig(**shared, **sparse)),
    ]
    passes = {"forward": forward, "both": [forward_backward(each, jax.random.key(2)) for each in forward]}
    found: dict[str, Any] = {}
    for name, cases in passes.items():
        with record_choices() as chosen:
            taken = compare(*compiled(cases))
        found["runs"] = chosen
        found[name] = {"dense": timed(taken.first), "sparse": timed(taken.second)} | {
            "dense_over_sparse": {"value": taken.ratio, "low": taken.low, "high": taken.high}
        }
    return found


def _time_parts(
    length: int, *, heads: int, groups: int, head_dim: int, block: int, top_k: int, window: int
) -> dict[str, Any]:
    """Time the branches of the sparse layer alone, and what chooses blocks."""
    import jax
    import jax.numpy as jnp

    from jaxblt.mixers.attention.pooled import Pooled, Queries, attend_blocks, choose_blocks
    from jaxblt.profiling import Case, compiled, forward_backward, measure_all
    from pallas_kernels.attention import Chosen, attention, masks

    q, k, v = _arguments(length, heads, groups, head_dim)
    times = jnp.arange(length, dtype=jnp.int32)[None]
    ones, numbers = jnp.ones_like(times), times[:, : -(-length // block)]
    lists = _draw_lists(length, groups, block, top_k)

    def pooled(k: Any, v: Any) -> Pooled:
        return Pooled(k[:, ::block], v[:, ::block], None, jnp.ones_like(numbers), numbers)

    runs = {
        "pooled": lambda q, k, v: attend_blocks(q, pooled(k, v), ones, times, block, causal=True, alone=True),
        "chosen": lambda q, k, v: attention(q, k, v, masks.CAUSAL & Chosen(lists, block)),
        "window": lambda q, k, v: attention(q, k, v, masks.CAUSAL & masks.window(window)),
    }
    forward = [Case(name, run, (q, k, v)) for name, run in runs.items()]
    both = [forward_backward(case, jax.random.key(1)) for case in forward]
    choose = Case(
        "choose",
        lambda q, k, v: choose_blocks(Queries(q, ones, times // block), pooled(k, v), top_k),
        (q, k, v),
    )
    return {found.name: timed(found) for found in measure_all(compiled([choose, *forward, *both]))}


def _arguments(tokens: int, heads: int, groups: int, head_dim: int) -> list[Any]:
    import jax
    import jax.numpy as jnp

    keys, counts = jax.random.split(jax.random.key(0), 3), (heads, groups, groups)
    shapes = [(1, tokens, count, head_dim) for count in counts]
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def _draw_lists(tokens: int, groups: int, block: int, top_k: int) -> Any:
    """Return blocks before each token's own, drawn with replacement: [1, G, T, top_k]."""
    import jax
    import jax.numpy as jnp

    before = (jnp.arange(tokens, dtype=jnp.int32) // block)[None, None, :, None]
    share = jax.random.uniform(jax.random.key(3), (1, groups, tokens, top_k))
    return jnp.where(before > 0, (share * before.astype(jnp.float32)).astype(jnp.int32), -1)


def _error(*, heads: int, groups: int, head_dim: int, block: int, top_k: int, window: int) -> float:
    """Return the relative error of attention to chosen blocks and of its gradients."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention import Chosen, attention, masks

    del window
    mask = masks.CAUSAL & Chosen(_draw_lists(CHECKED, groups, block, top_k), block)

    def run(name: Any, *args: Any) -> list[np.ndarray]:
        attend = partial(attention, mask=mask, implementation=name)
        loss = lambda *args: jnp.sum(jnp.sin(attend(*args).astype(jnp.float32)))  # noqa: E731
        found = jax.jit(lambda *args: (attend(*args), *jax.grad(loss, (0, 1, 2))(*args)))(*args)
        return [np.asarray(x, np.float64) for x in found]

    args = _arguments(CHECKED, heads, groups, head_dim)
    pairs = zip(run(None, *args), run("reference", *(x.astype("float32") for x in args)), strict=True)
    error = max(float(np.linalg.norm(got - right) / np.linalg.norm(right)) for got, right in pairs)
    if not error <= WITHIN:
        raise RuntimeError(f"chosen blocks are off the reference by {error:.2e}, {WITHIN:.2e} is allowed")
    return error
