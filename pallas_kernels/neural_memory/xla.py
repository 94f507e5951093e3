"""Windows one after another, with the gradient of the memory written out in matrix products."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_alike
from pallas_kernels._conv.gates import accumulator
from pallas_kernels._linear_state.tokens import only_tokens
from pallas_kernels.neural_memory.chunks import Chunk, MemoryState, Trace, read_memory, write_memory
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
    content = jnp.ones((rows, length), bool) if segment_ids is None else segment_ids > 0
    chunk = Chunk(
        *(take_windows(x, width, source) for x in streams[1:]), content=_content(content, width, source)
    )
    windows = (take_windows(streams[0], width), chunk, cut)
    flat, tree = jax.tree.flatten((fresh, state, windows))
    fresh, state, windows = jax.tree.unflatten(tree, vary_alike(*flat))
    step = partial(_window, fresh, v.dtype, output_trace)
    final, (y, trace) = scan_windows(step, state, windows)
    found = [leave_windows(y, length)]
    if output_final_state:
        found.append(final)
    if output_trace:
        found.append(jax.tree.map(lambda x: leave_windows(x, length), trace))
    return tuple(found) if len(found) > 1 else found[0]


def _content(content: Array, width: int, source: Any) -> Array:
    return take_windows(content[:, :, None], width, source)[:, :, 0]


def _window(
    fresh: MemoryState, dtype: Any, traced: bool, state: MemoryState, window: Any
) -> tuple[MemoryState, Any]:
    """The state behind a window; what its tokens read, and the trace of the chunk that ended in it if asked for."""
    q, chunk, cut = window
    cut = Windows(*cut)
    state = choose(cut.begins, fresh, state)
    y = read_memory(state.weights, q, dtype)
    written, trace = write_memory(state, chunk, dtype)
    after = choose(cut.ends, written, state)
    places = jnp.arange(q.shape[2], dtype=jnp.int32)
    last = q.shape[2] if cut.at is None else cut.at[:, None]
    ended = cut.ends[:, None] & (places[None] == last - 1)
    trace = jax.tree.map(lambda x: jnp.where(ended[:, None], x[..., None], 0), trace)
    if cut.at is not None:
        behind = cut.ends[:, None] & (places[None] >= cut.at[:, None])
        y = jnp.where(_of_tokens(behind), read_memory(after.weights, q, dtype), y)
        y = jnp.where(_of_tokens(cut.first), y, read_memory(fresh.weights, q, dtype))
        after = choose(cut.leaves, fresh, after)
    return after, (y.astype(dtype), Trace(*trace) if traced else None)


def _of_tokens(mask: Any) -> Array:
    return mask[:, None, :, None]
