"""Codes of a router whose parameters are drawn by their paths, of whole rows and of rows in calls."""

import zlib
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters.code.router import Router, init_router_state
from jaxblt.side_outputs import SIDE_OUTPUTS

TURNS = pytest.mark.slow(days=28, group="whole runs")
"""Programs of a router take seconds to compile: a few of them a day."""

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
        # Put on the device: jnp.asarray compiles a program for each shape
        return jax.device_put(rng.standard_normal(shape.shape).astype(shape.dtype))

    made = jax.eval_shape(Router(config).init, jax.random.key(0), inputs(), **given)
    return jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(made)["params"])


@cache
def passes(config):
    """The router's compiled pass, with a state or without: ((code, state), what it sowed)."""
    return jax.jit(partial(Router(config).apply, mutable=list(SIDE_OUTPUTS)))


def whole(config, params, x, ids, **given):
    """Codes of whole rows."""
    return np.asarray(sown(config, params, x, ids, **given)[0][0])


def sown(config, params, x, ids, **given):
    """((code, None), what the router sowed) of whole rows."""
    return passes(config)({"params": params}, x, segment_ids=ids, **given)


def in_calls(config, params, x, ids, size=7, **given):
    """Codes of the same rows in calls of `size` tokens, the last one filled up with nothing."""
    step = passes(config)
    state, found = init_router_state(config, len(ids), x.shape[-1]), []
    for at in range(0, ids.shape[1], size):
        rows = {name: _cut(value, at, size) for name, value in given.items()}
        (code, state), _ = step(
            {"params": params}, _cut(x, at, size), segment_ids=_cut(ids, at, size), state=state, **rows
        )
        found.append(np.asarray(code))
    return np.concatenate(found, 1)[:, : ids.shape[1]]


def _cut(x, at, size):
    part = x[:, at : at + size]
    return jnp.asarray(np.pad(part, ((0, 0), (0, size - part.shape[1]), (0, 0))[: x.ndim]))
