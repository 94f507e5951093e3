"""Attention of a few queries to what a cache holds: a prefix of its slots, as long as each query says.

A kernel reads no slot behind the longest prefix of its row. Its gradient is XLA's, which visits all slots.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import _dispatch
from pallas_kernels._arguments import checked
from pallas_kernels._dispatch import Implementation
from pallas_kernels._own_gradient import OwnGradient
from pallas_kernels.attention import prefix_why, reference, xla
from pallas_kernels.attention.masks import CAUSAL, positions
from pallas_kernels.attention.partial import Partial

NEVER = np.iinfo(np.int32).max
"""Position of a slot that no query sees."""


def _masked(
    run: Any, q: Array, k: Array, v: Array, counts: Array, times: Array, *, scale: Any, cast_output: bool
) -> Any:
    """Run attention that visits all slots."""
    slots = jnp.arange(times.shape[1], dtype=jnp.int32)[None]
    mask = CAUSAL & positions(counts - 1, jnp.where(times >= 0, slots, NEVER))
    o, lse = run(q, k.astype(q.dtype), v.astype(q.dtype), mask, scale=scale)
    return (o.astype(q.dtype) if cast_output else o), lse


def _triton(*arrays: Array, scale: float | None, cast_output: bool) -> Any:
    return _read((None if scale is None else float(scale), cast_output), *arrays)


@partial(OwnGradient, nondiff_argnums=(0,))
def _read(options: tuple[float | None, bool], *arrays: Array) -> Any:
    """Import the kernel where it runs, as Pallas' GPU dialect takes over a second to import."""
    from pallas_kernels.attention.triton_prefix import prefix_attention

    return prefix_attention(*arrays, scale=options[0], cast_output=options[1])


def _keep(options: tuple[float | None, bool], *arrays: Array) -> tuple[Any, tuple[Array, ...]]:
    return _read(options, *arrays), arrays


def _gradients(options: tuple[float | None, bool], kept: tuple[Array, ...], do: Any) -> tuple[Any, ...]:
    q, k, v, *marks = kept

    def run(q: Array, k: Array, v: Array) -> Any:
        return _masked(xla.attention_with_lse, q, k, v, *marks, scale=options[0], cast_output=options[1])

    return *jax.vjp(run, q, k, v)[1](do), None, None


_read.defvjp(_keep, _gradients)

TABLE = (
    Implementation("triton", _triton, prefix_why.why_not),
    Implementation("xla", partial(_masked, xla.attention_with_lse)),
    Implementation("reference", partial(_masked, reference.attention_with_lse)),
)
"""Fastest first."""


@checked
def prefix_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G K"],
    counts: Int[Array, "B T"],
    times: Int[Array, "B S"],
    *,
    scale: float | None = None,
    cast_output: bool = False,
    implementation: Literal["triton", "xla", "reference"] | None = None,
) -> Partial:
    """Return attention of query t of row b to the keys s < counts[b, t], with its log-sum-exp.

    Both are fp32. A query that sees no key gives 0 and EMPTY_LSE.

    Args:
      q: a few queries, such as a decoded token or drafted ones; H heads of size K.
      k: keys of a cache, G heads; H is a multiple of G. They may be of another dtype, as which they are read.
      v: its values, likewise.
      counts: the length of the prefix that a query sees; 0 for one that sees nothing, more than S for all.
      times: of the token in each slot, negative for a slot that holds none. What such slots hold has to be numbers.
      scale: of the scores; K**-0.5 if None.
      cast_output: give o in q's dtype, as nothing is merged into it.
      implementation: which to run; the best for the device and these arguments if None.

    Raises:
      ValueError: shapes do not fit together, or the implementation cannot run this here.
    """
    _check(q, k, v, counts, times)
    device, arrays = _dispatch.current_device(), (q, k, v, counts, times)
    options: dict[str, Any] = {"scale": scale, "cast_output": cast_output}
    entry = _dispatch.choose("prefix_attention", TABLE, implementation, device, *arrays, **options)
    return Partial(*entry.run(*arrays, **options))


def skips_empty_slots(q: Any, k: Any) -> bool:
    """Check whether a kernel of `prefix_attention` runs here for such arrays, or shapes, and reads prefixes only."""
    if _dispatch.has_reference_ops():
        return False
    return TABLE[0].cannot_run(_dispatch.current_device(), q, k, k, None, None) is None


def _check(q: Any, k: Any, v: Any, counts: Any, times: Any) -> None:
    (rows, queries, heads, width), (_, slots, groups, _) = q.shape, k.shape
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (rows, width) or heads % groups:
        raise ValueError(
            f"expected q [B, T, H, K] and k, v of one shape [B, S, G, K] with H a multiple of G, got {q.shape}, "
            f"{k.shape}, {v.shape}"
        )
    if (counts.shape, times.shape) != ((rows, queries), (rows, slots)):
        raise ValueError(
            f"counts and times must have shapes {(rows, queries)} and {(rows, slots)}, got {counts.shape} and "
            f"{times.shape}"
        )
