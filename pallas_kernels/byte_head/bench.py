"""Cross-entropy of a byte head against all logits and optax: `python -m pallas_kernels.byte_head.bench`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._bench import Plan, Work, benchmark
from pallas_kernels._measure import Case
from pallas_kernels.byte_head import reference, xla
from pallas_kernels.byte_head.shapes import SHAPES, ByteHeadShape

CHUNKS = (8_192, 32_768, 131_072)
"""Tokens whose logits exist at a time, each timed."""


def plan(shape: ByteHeadShape, dtype: Any = jnp.bfloat16) -> Plan:
    """Plan every chunk length against the plain version.

    Hidden states are in `dtype`, the head is in fp32.
    """
    states, weights, ids = jax.random.split(jax.random.key(1), 3)
    tokens = shape.batch * shape.length
    args = (
        jax.random.normal(states, (shape.batch, shape.length, shape.dim), dtype),
        jax.random.normal(weights, (shape.dim, shape.vocab)) * shape.dim**-0.5,
        jax.random.randint(ids, (shape.batch, shape.length), 0, shape.vocab, jnp.int32),
    )
    matmul = 2.0 * tokens * shape.dim * shape.vocab
    x, head, numbers = (float(a.nbytes) for a in args)
    return Plan(
        truth=Case("reference", _by_rows(reference.cross_entropy), args),
        plain=Case("plain", _plain, args),
        versions=[Case(f"chunks_of_{n}", partial(xla.cross_entropy, tokens=n), args) for n in CHUNKS],
        work={
            "forward": Work(matmul, x + head + 2 * numbers),
            "forward+backward": Work(3 * matmul, 2 * (x + head) + 3 * numbers),
        },
    )


def _plain(x: Any, head: Any, targets: Any) -> Any:
    import optax

    logits = jnp.einsum("btd,dv->btv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _by_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Run row after row, so that fp32 logits of a whole batch need no room."""

    def run(x: Any, head: Any, targets: Any) -> Any:
        return jax.lax.map(lambda row: fn(row[0], head, row[1]), (x, targets))

    return run


if __name__ == "__main__":
    print(benchmark("byte_head", SHAPES, plan))
