"""Codes of a router whose parameters are drawn by their paths, of whole rows and of rows in calls."""

import zlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.adapters.router import Router, init_router_state

WIDTH, LENGTH = 6, 40
DOCUMENTS = np.stack([np.repeat([1, 2], [26, 14]), np.repeat([4, 0, 5, 0], [9, 2, 24, 5])]).astype(np.int32)
"""Segment ids of two rows of two documents, with padding between and behind them."""


def with_holes(ids):
    """A third of the tokens as holes."""
    return np.where(np.random.default_rng(5).random(ids.shape) < 1 / 3, -ids, ids)


def inputs(salt=0, width=WIDTH):
    """Rows for `DOCUMENTS`."""
    rng = np.random.default_rng([7, salt])
    return rng.standard_normal((*DOCUMENTS.shape, width)).astype(np.float32)


def params_of(config, **given):
    """Every parameter drawn, kernels of 0 too."""

    def draw(path, shape):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jnp.asarray(rng.standard_normal(shape.shape).astype(shape.dtype))

    rows = {name: jnp.asarray(x) for name, x in given.items()}
    made = jax.eval_shape(Router(config).init, jax.random.key(0), jnp.asarray(inputs()), **rows)
    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(made)["params"])


def whole(config, params, x, ids, **given):
    """Codes of whole rows."""
    rows = {name: jnp.asarray(value) for name, value in given.items()}
    apply = jax.jit(Router(config).apply)
    code = apply({"params": params}, jnp.asarray(x), segment_ids=jnp.asarray(ids), **rows)[0]  # type: ignore[index]
    return np.asarray(code)


def in_calls(config, params, x, ids, size=7, **given):
    """Codes of the same rows in calls of `size` tokens, the last one filled up with nothing."""
    step = jax.jit(partial(Router(config).apply, {"params": params}))
    state, found = init_router_state(config, len(ids), x.shape[-1]), []
    for at in range(0, ids.shape[1], size):
        missing = max(at + size - ids.shape[1], 0)
        cut = (
            lambda a, at=at, missing=missing: jnp.asarray(  # noqa: E731
                np.pad(a[:, at : at + size], ((0, 0), (0, missing), (0, 0))[: a.ndim])
            )
        )
        rows = {name: cut(value) for name, value in given.items()}
        code, state = step(cut(x), segment_ids=cut(ids), state=state, **rows)
        found.append(np.asarray(code)[:, : size - missing])
    return np.concatenate(found, 1)
