"""Kernels of a ring's step on one GPU, one against the other: python -m experiments.benchmark attention_parts --out F.

Partial attention is that to some of the keys with fp32 results, alone or merged into that to other keys. Errors are
relative norms against the reference in fp32. Rounds alternate.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.benchmark.figures.saved import save
from experiments.benchmark.operations.attention_errors import hold

Name = Literal["mosaic_gpu", "cudnn", "xla", "reference"]


class PartialShape(NamedTuple):
    """One row: T queries of H heads and S keys of G, K wide; merged into an accumulator, or the first."""

    tokens: int
    keys: int
    heads: int
    groups: int
    head_dim: int
    causal: bool
    accumulate: bool

    @property
    def flops(self) -> float:
        """FLOP of the visible scores, forward: 2 matmuls."""
        return (2.0 if self.causal else 4.0) * self.tokens * self.keys * self.heads * self.head_dim


SHAPES = tuple(
    PartialShape(tokens, tokens, heads, 8, head_dim, causal, not causal)
    for heads, head_dim in ((32, 128), (64, 64))
    for tokens, causal in ((2048, True), (8192, True), (1024, False), (4096, False), (8192, False))
)
CHECKED = 1024
"""Tokens up to which errors against the reference are taken, which holds all scores: other lengths are cut to it."""

WITHIN = 1.25
"""Errors of the first that pass, in units of the second's."""


def attention_parts(
    out: str = "runs/benchmark/attention_parts.json",
    first: Name = "mosaic_gpu",
    second: Name = "cudnn",
    shapes: tuple[PartialShape, ...] = SHAPES,
) -> dict[str, Any]:
    """Compare errors, milliseconds and TFLOP/s of both, in bf16.

    Args:
      out: JSON file to write.
      first, second: implementations of `partial_attention`.
      shapes: each as tokens, keys, heads, groups, head size, causal, accumulate.

    Raises:
      RuntimeError: an error of the first is more than WITHIN times the second's.
      ValueError: no shape is given, or one of no size.
    """
    if wrong := [shape for shape in shapes if min(shape) < 0 or 0 in shape[:5]] or not shapes:
        raise ValueError(
            f"shapes must be positive tokens, keys, heads, groups and head sizes, got {wrong or shapes}"
        )
    figures: dict[str, Any] = {"first": first, "second": second, "calls": []}
    for shape in shapes:
        figures["calls"].append(shape._asdict() | _compare(shape, first, second))
        save("attention_parts", out, figures)
    return figures


def _compare(shape: PartialShape, first: Name, second: Name) -> dict[str, Any]:
    cut = shape._replace(tokens=min(shape.tokens, CHECKED), keys=min(shape.keys, CHECKED))
    found = {name: _errors(cut, name) for name in (first, second)}
    hold(first, found[first], second, found[second], WITHIN)
    sides = [partial(_forward, shape, name) for name in (first, second)]
    return {"errors": found, "forward": _time(shape.flops, sides, _arguments(shape))}


def _arguments(shape: PartialShape) -> tuple[Any, ...]:
    """Draw q, k, v, and an accumulator's output and log-sum-exp."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 6)
    of_queries, of_keys = (
        (1, shape.tokens, shape.heads, shape.head_dim),
        (1, shape.keys, shape.groups, shape.head_dim),
    )
    sizes = (of_queries, of_keys, of_keys)
    q, k, v = (jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys[:3], sizes, strict=True))
    lse = jax.random.normal(keys[4], (1, shape.heads, shape.tokens)) + np.log(shape.keys)
    return q, k, v, 0.02 * jax.random.normal(keys[5], of_queries), lse


def _forward(shape: PartialShape, name: Name, q: Any, k: Any, v: Any, o: Any, lse: Any) -> tuple[Any, Any]:
    """Return output and log-sum-exp in fp32, as whoever merges needs them."""
    from pallas_kernels.attention import Partial, masks, partial_attention

    accumulator = Partial(o, lse) if shape.accumulate else None
    mask = masks.band(shape.causal)
    found = partial_attention(q, k, v, mask, accumulator=accumulator, implementation=name)
    return found.o.astype("float32"), found.lse


def _errors(shape: PartialShape, name: Name) -> dict[str, float]:
    """Return |o - exact| / |exact|."""
    import jax

    args = _arguments(shape)
    got, exact = (
        np.asarray(jax.jit(partial(_forward, shape, version))(*args)[0], np.float64)
        for version in (name, "reference")
    )
    return {"o": float(np.linalg.norm(got - exact) / np.linalg.norm(exact))}


def _time(flops: float, sides: list[Callable[..., Any]], args: tuple[Any, ...]) -> dict[str, Any]:
    """Time both, and return the first's time over the second's with its 95 % interval, too."""
    from pallas_kernels.runtime import Case, compare

    found = compare(*(Case(name, side, args) for name, side in zip(("first", "second"), sides, strict=True)))
    seconds = {side.name: side.summary.median for side in (found.first, found.second)}
    return {
        "ms": {name: 1e3 * taken for name, taken in seconds.items()},
        "tflops": {name: flops / taken / 1e12 for name, taken in seconds.items()},
        "ratio": {"value": found.ratio, "low": found.low, "high": found.high},
    }
