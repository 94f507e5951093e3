"""Packed rows in a causal ring, cuDNN against XLA: python -m experiments.benchmark packed_ring --out FILE."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from experiments.benchmark.figures.saved import save, timed
from experiments.benchmark.operations.attention_errors import errors, hold
from experiments.benchmark.splitting.ring_programs import Shape, inputs
from jaxblt.profiling import Case, measure_all
from pallas_kernels.attention.bench import segment_ids
from pallas_kernels.attention.shapes import AttentionShape

Implementation = Literal["cudnn", "xla", "reference"]

WITHIN = 2.0
"""Errors of the form by lengths that pass, in units of XLA's in the same precision; what they are, is reported."""


def packed_ring(
    out: str = "runs/benchmark/packed_ring.json",
    length: int = 65_536,
    documents: tuple[int, ...] = (8, 64),
    heads: int = 8,
    groups: int = 8,
    head_dim: int = 64,
    implementations: tuple[Implementation, ...] = ("cudnn", "xla"),
) -> dict[str, Any]:
    """Measure errors of o, dq, dk, dv and seconds of one row of `length` tokens over all devices, in bf16.

    Implementations alternate, round by round. The truth is the ring on XLA in fp32 with full precision. Rows are in
    zig-zag order.

    Args:
      out: JSON file to write.
      length: tokens of the row.
      documents: how many the row holds, their ends drawn evenly.
      heads: query heads.
      groups: key and value heads.
      head_dim: width of a head.
      implementations: rings to run; the first is held to the errors of the last.

    Raises:
      RuntimeError: an error of the first is more than WITHIN times the last's.
      ValueError: there is only one device, or one implementation, or the row has no room for so many documents.
    """
    import jax

    if (devices := jax.device_count()) < 2:
        raise ValueError(f"a ring needs at least 2 devices, there is {devices}: use a machine with more")
    if not documents or any(not 0 < count <= length for count in documents):
        raise ValueError(f"documents must lie in 1..{length}, the tokens of the row, got {documents}")
    if len(implementations) < 2:
        raise ValueError(f"one implementation is held to another: give two, got {implementations}")
    found: dict[str, Any] = {
        "devices_in_ring": devices,
        "shape": [1, length, heads, groups, head_dim],
        "rows": [],
    }
    for count in documents:
        shape = AttentionShape("packed", 1, length, heads, groups, head_dim, documents=count)
        found["rows"].append(_row(shape, implementations))
        save("packed_ring", out, found)
    return found


def _row(shape: AttentionShape, implementations: Sequence[Implementation]) -> dict[str, Any]:
    import jax

    from jaxblt.parallel import ZIGZAG, batch_sharding, make_mesh

    mesh = make_mesh(data=1, seq=-1)
    split, order = batch_sharding(mesh), ZIGZAG.order(shape.tokens, jax.device_count())
    ids = jax.device_put(segment_ids(shape)[:, order], split)
    given = inputs(Shape(shape.tokens, shape.heads, shape.groups, shape.head_dim, "bfloat16"), split)
    row: dict[str, Any] = {"documents": shape.documents}
    with jax.set_mesh(mesh):
        wide = (ids, *(x.astype("float32") for x in given))
        with jax.default_matmul_precision("highest"):
            exact = [np.asarray(x, np.float64) for x in _both("xla").lower(*wide).compile()(*wide)]
        forward = {
            name: jax.jit(partial(_attend, name)).lower(ids, *given[:3]).compile() for name in implementations
        }
        both = {name: _both(name).lower(ids, *given).compile() for name in implementations}
        for name in implementations:
            row[name] = {"errors": errors([np.asarray(x) for x in both[name](ids, *given)], exact)}
    first, last = implementations[0], implementations[-1]
    hold(first, row[first]["errors"], last, row[last]["errors"], WITHIN)
    for name, steps, args in (
        ("forward", forward, (ids, *given[:3])),
        ("forward_backward", both, (ids, *given)),
    ):
        cases = [Case(implementation, step, args) for implementation, step in steps.items()]
        for found in measure_all(cases, method="calls"):
            row[found.name][name] = timed(found)
    return row


def _attend(name: Any, ids: Any, q: Any, k: Any, v: Any) -> Any:
    from jaxblt.parallel import ZIGZAG, context_attention

    return context_attention(q, k, v, ids, mode="ring", layout=ZIGZAG, causal=True, implementation=name)


def _both(name: Any) -> Any:
    """Return output and gradients, jitted."""
    import jax

    def run(ids: Any, q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
        o, backward = jax.vjp(partial(_attend, name, ids), q, k, v)
        return (o, *backward(do))

    return jax.jit(run)
