"""Writes of windows one after another, and reads of all windows of a group at once.

No write waits for a read, so reads are products over many windows: long enough to fill a GPU at any chunk.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels.neural_memory.chunks import (
    PLAIN,
    Chunk,
    MemoryState,
    Products,
    Unsettled,
    at_rest,
    gather,
    settle,
    trace_of,
    update_memory,
)
from pallas_kernels.neural_memory.two_layers import KEPT, rounded
from pallas_kernels.neural_memory.windows import (
    Windows,
    choose,
    cut_rows,
    leave_windows,
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
    """See `neural_memory`."""
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
    windows = (take_windows(streams[0], width), gather(chunk), cut)
    flat, tree = jax.tree.flatten((fresh, state, windows))
    fresh, state, windows = jax.tree.unflatten(tree, vary_alike(*flat))
    fresh, state = (at_rest(x) for x in (fresh, state))
    # Keep the memory between two windows and what is small: what has a column a hidden unit costs more to keep.
    few = jax.checkpoint_policies.save_only_these_names(KEPT)
    write = partial(_write, products, fresh, v.dtype, output_trace)
    write = jax.checkpoint(write, prevent_cse=False, policy=few)
    finish = partial(_read, partial(_read_windows, products, v.dtype), fresh.state.weights, v.dtype)
    final, (y, trace) = scan_windows(write, state, windows, finish)
    found: list[Any] = [leave_windows(y, length)]
    if output_final_state:
        found.append(settle(final))
    if output_trace:
        found.append(jax.tree.map(lambda x: leave_windows(x, length), trace))
    return tuple(found) if len(found) > 1 else found[0]


def _content(content: Array, width: int, source: Any) -> Array:
    return take_windows(content[:, :, None], width, source)[:, :, 0]


def _write(
    products: Products, fresh: Unsettled, dtype: Any, traced: bool, before: Unsettled, window: Any
) -> tuple[Unsettled, Any]:
    """The memory behind a window; the weights that its tokens read, and the trace of the chunk that ended in it."""
    q, asked, cut = window
    cut = Windows(*cut)
    before = choose(cut.begins, fresh, before)
    state = settle(before)
    written, surprise = update_memory(state, asked, dtype, products)
    after = choose(cut.ends, written, before)
    seen = (state.weights,) if cut.at is None else (state.weights, settle(after).weights)
    seen = jax.tree.map(lambda m: rounded(m, dtype), seen)
    trace = None
    if traced:
        places = jnp.arange(q.shape[2], dtype=jnp.int32)
        last = q.shape[2] if cut.at is None else cut.at[:, None]
        ended = (cut.ends & asked.some)[:, None] & (places[None] == last - 1)
        trace = trace_of(settle(written), surprise)
        trace = jax.tree.map(lambda x: jnp.where(ended[:, None], x[..., None], 0), trace)
    return choose(cut.leaves, fresh, after), (seen, trace)


def _read(read: Any, fresh: Any, dtype: Any, windows: Any, found: Any) -> Any:
    """What the tokens of several windows read, all at once, and the trace as it is."""
    (q, _, cut), (seen, trace) = windows, found
    cut = Windows(*cut)
    y = read(seen[0], q)
    if cut.at is not None:
        places = jnp.arange(q.shape[3], dtype=jnp.int32)[None, None]
        behind = cut.ends[..., None] & (places >= cut.at[..., None])
        y = jnp.where(_of_tokens(behind), read(seen[1], q), y)
        start = jax.tree.map(lambda m: jnp.broadcast_to(m.astype(dtype), (len(q), *m.shape)), fresh)
        y = jnp.where(_of_tokens(cut.first), y, read(start, q))
    return y.astype(dtype), trace


def _read_windows(
    products: Products, dtype: Any, weights: Any, q: Float[Array, "N B H C K"]
) -> Float[Array, "N B H C K"]:
    weights, rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (weights, q))
    return products.read(weights, rows, dtype).reshape(q.shape)


def _of_tokens(mask: Any) -> Array:
    return mask[:, :, None, :, None]
