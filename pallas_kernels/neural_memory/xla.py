"""Windows one after another, each read from the memory before it and then written."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels.neural_memory.chunks import (
    PLAIN,
    Chunk,
    MemoryState,
    Products,
    Step,
    Trace,
    Unsettled,
    at_rest,
    bound,
    gather,
    settle,
    trace_of,
    update_memory,
)
from pallas_kernels.neural_memory.two_layers import KEPT
from pallas_kernels.neural_memory.windows import (
    Windows,
    choose,
    cut_rows,
    leave_windows,
    missing_windows,
    scan_windows,
    take_windows,
)


def neural_memory_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    theta: Float[Array, "B T H"],
    eta: Float[Array, "B T H"],
    alpha: Float[Array, "B T H"],
    weights: tuple[Float[Array, "H _ _"], ...],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_alignment: int = 1,
    initial_state: MemoryState | None = None,
    output_final_state: bool = False,
    output_trace: bool = False,
    chunk_size: int = 512,
    products: Products = PLAIN,
) -> Any:
    """Compute `neural_memory` by XLA."""
    wide, (rows, length) = accumulator(v.dtype), v.shape[:2]
    start = tuple(jnp.broadcast_to(m.astype(wide), (rows, *m.shape)) for m in weights)
    fresh = MemoryState(start, jax.tree.map(jnp.zeros_like, start))
    state = fresh if initial_state is None else initial_state
    streams = [only_tokens(x, segment_ids) for x in (q, k, v, theta, eta, alpha)]
    width = min(chunk_size, length)
    aligned = segment_alignment % chunk_size == 0
    cut, source = cut_rows(segment_ids, (rows, length), width, aligned=aligned)
    if length < chunk_size:  # a window is no chunk: none ends
        cut = cut._replace(ends=jnp.zeros_like(cut.ends))
    content = None if segment_ids is None else _content(segment_ids > 0, width, source)
    chunk = Chunk(*(take_windows(x, width, source) for x in streams[1:]), content=content)
    asked = gather(chunk)
    if segment_ids is not None or length % chunk_size or missing_windows(len(cut.ends)):
        asked = _only_chunks(asked, cut.ends)
    windows = (take_windows(streams[0], width), asked, cut)
    flat, tree = jax.tree.flatten((fresh, state, windows))
    fresh, state, windows = jax.tree.unflatten(tree, vary_alike(*flat))
    fresh, state = (at_rest(x) for x in (fresh, state))
    # Keep only the memory between two windows and what is small: what has a column a hidden unit costs more to keep.
    few = jax.checkpoint_policies.save_only_these_names(KEPT)
    write = partial(update_memory, dtype=v.dtype, products=products)
    write = jax.checkpoint(write, prevent_cse=False, policy=few)
    read = partial(_read, partial(products.read, dtype=v.dtype), fresh)

    def step(before: Unsettled, window: Any) -> tuple[Unsettled, Any]:
        q, asked, cut = window
        cut = Windows(*cut)
        before = choose(cut.begins, fresh, before)
        after, surprise = write(before, asked)
        trace = _trace(after, surprise, asked, cut) if output_trace else None
        return choose(cut.leaves, fresh, after), (read(before, after, q, cut).astype(v.dtype), trace)

    final, (y, trace) = scan_windows(step, state, windows, unrolled=True)
    found: list[Any] = [only_tokens(leave_windows(y, length), segment_ids)]
    if output_final_state:
        found.append(settle(final))
    if output_trace:
        found.append(jax.tree.map(lambda x: leave_windows(x, length), trace))
    return tuple(found) if len(found) > 1 else found[0]


def _content(content: Array, width: int, source: Any) -> Array:
    return take_windows(content[:, :, None], width, source)[:, :, 0]


def _only_chunks(asked: Step, ends: Bool[Array, "N B"]) -> Step:
    """Ask for nothing in windows in which no chunk ends."""
    some = ends if asked.some is None else ends & asked.some
    return asked._replace(some=some, theta=jnp.where(some[..., None, None], asked.theta, 0))


def _read(
    read: Any, fresh: Unsettled, before: Unsettled, after: Unsettled, q: Float[Array, "B H C K"], cut: Windows
) -> Float[Array, "B H C K"]:
    """Read a window's memory: that before it, that behind its chunk, or a new document's."""

    def found(memory: Unsettled) -> Array:
        return read(memory.state.weights, q, scale=bound(memory))

    y = found(before)
    if cut.at is not None:
        places = jnp.arange(q.shape[2], dtype=jnp.int32)[None]
        behind = cut.ends[:, None] & (places >= cut.at[:, None])
        y = jnp.where(_of_tokens(behind), found(after), y)
        y = jnp.where(_of_tokens(cut.first), y, found(fresh))
    return y


def _trace(after: Unsettled, surprise: Float[Array, "B H"], asked: Step, cut: Windows) -> Trace:
    """Return a window's trace, zero except at the last token of the chunk that ended there."""
    width = asked.theta.shape[2]
    last = width if cut.at is None else cut.at[:, None]
    ended = jnp.arange(width, dtype=jnp.int32)[None] == last - 1
    if asked.some is not None:
        ended &= asked.some[:, None]
    trace = trace_of(settle(after), surprise)
    return jax.tree.map(lambda x: jnp.where(ended[:, None], x[..., None], 0), trace)


def _of_tokens(mask: Any) -> Bool[Array, "B 1 C 1"]:
    return mask[:, None, :, None]
