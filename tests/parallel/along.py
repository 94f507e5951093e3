"""Runs a function of arrays split along the sequence, against itself on one device."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxblt.mixers import MixerConfig
from jaxblt.parallel import make_mesh
from tests.parameters import drawn
from tests.tolerances import assert_close

ROWS = 2


def segments(layout: str, length: int) -> np.ndarray | None:
    """Segment ids of two rows; None for `whole`. Shards of 2, 4 and 8 devices have edges at eighths of the length."""
    if layout == "whole":
        return None
    ids = np.ones((ROWS, length), np.int32)
    spans = {
        # over every edge; many in one shard; shards of padding alone, within and at the end; holes on edges
        "crossing": [(0.0, 0.45, 1), (0.45, 1.0, 2)],
        "inside": [(0.0, 0.03, 1), (0.03, 0.07, 2), (0.07, 0.12, 3), (0.12, 0.5, 4), (0.5, 1.0, 5)],
        "padded": [(0.0, 0.3, 1), (0.3, 0.6, 0), (0.6, 0.8, 2), (0.8, 1.0, 0)],
        "holes": [(0.0, 0.2, 1), (0.2, 0.27, -1), (0.27, 0.45, 1), (0.45, 0.55, -1), (0.55, 1.0, 2)],
    }[layout]
    for begin, end, document in spans:
        ids[0, round(begin * length) : round(end * length)] = document
    ids[1, length // 3 :] = 2
    return ids


def passes(module: nn.Module, params: Any, x: Any, ids: Any, dy: Any) -> tuple[Any, Any]:
    """Outputs, and gradients of <dy, y> by parameters and inputs."""
    y, back = jax.vjp(lambda p, x: module.apply(p, x, segment_ids=ids)[0], params, x)  # pyright: ignore
    return y, back(dy)


@functools.cache
def alone(config: MixerConfig, layout: str, length: int) -> tuple[Any, Any, Any]:
    """Module, arguments of `passes`, and what they give on one device."""
    module, ids = config.build(), segments(layout, length)
    noise = np.random.default_rng(0).standard_normal((2, ROWS, length, config.dim)).astype(np.float32)
    x, dy = noise if ids is None else noise * (ids > 0)[None, ..., None]
    params = drawn(module, x)
    args = (params, x, ids, dy)
    return module, args, jax.device_get(jax.jit(functools.partial(passes, module))(*args))


def along(fn: Callable[..., Any], params: Any, sequenced: Any, *, seq: int, data: int = 1) -> tuple[Any, Any]:
    """`fn(params, *sequenced)` with time split among `seq` devices: results, and the compiled program."""
    mesh = make_mesh(data=data, seq=seq, devices=jax.devices()[: data * seq])
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec("data", "seq"))
        args = (
            jax.device_put(params, NamedSharding(mesh, PartitionSpec())),
            *jax.device_put(sequenced, split),
        )
        compiled = jax.jit(fn).lower(*args).compile()
        return jax.device_get(compiled(*args)), compiled


def expect_same(found: Any, expected: Any, ids: np.ndarray | None, n: int) -> None:
    """Outputs at tokens, and all gradients, within the table's bound for sums of n terms."""
    (y, gradients), (y1, gradients1) = found, expected
    live = np.ones(y.shape[:2], bool) if ids is None else ids > 0
    assert_close(y[live], y1[live], n=n, what="output")
    for path, leaf in jax.tree.leaves_with_path(gradients1):
        got = functools.reduce(
            lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))], path, gradients
        )
        assert_close(got, leaf, n=n, what=f"gradient{jax.tree_util.keystr(path)}")
