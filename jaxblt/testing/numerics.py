"""Properties of gradients, dtypes, compilation and sharding."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxblt.mixers.base import init_state
from jaxblt.testing.subject import Subject, expect_close
from jaxblt.testing.tolerances import DIFFERENCED, bound, typical

STEPS = (1e-2, 3e-3, 1e-3, 3e-4)
"""Steps of the differences, in units of a parameter's size: one is to be small enough for the curvature and
large enough for fp32. A wrong gradient agrees with none."""


def check_gradients(subject: Subject) -> None:
    """The gradient by the inputs and by each parameter is what central differences give.

    <dy, y> is differenced along the gradient itself, which shows a wrong size, and along a random direction,
    which shows what is missing.
    """
    ids, dy = jnp.asarray(subject.with_holes(subject.documents())), subject.noise(4, subject.x.shape)
    dy = dy * (np.asarray(ids) > 0)[..., None]
    point = {"params": subject.params, "x": jnp.asarray(subject.x)}
    by_params, by_x = subject.gradient(point["params"], point["x"], ids, jnp.asarray(dy))
    leaves, treedef = jax.tree.flatten(point)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(point)]
    gradients = jax.tree.leaves({"params": by_params, "x": by_x})
    for i, (name, leaf, gradient) in enumerate(zip(names, leaves, gradients, strict=True)):

        def value(moved: np.ndarray, i: int = i) -> float:
            at = jax.tree.unflatten(treedef, [*leaves[:i], jnp.asarray(moved), *leaves[i + 1 :]])
            y = subject.parallel(at["params"], at["x"], ids)
            return float(np.sum(np.asarray(y, np.float64) * dy))

        _expect_derivative(
            name, value, np.asarray(leaf), np.asarray(gradient, np.float64), subject.noise(5 + i, leaf.shape)
        )


def _expect_derivative(
    name: str, value: Callable[[np.ndarray], float], leaf: np.ndarray, gradient: np.ndarray, noise: np.ndarray
) -> None:
    size = float(np.sqrt(np.mean(leaf.astype(np.float64) ** 2))) or 1.0
    norm = float(np.linalg.norm(gradient))
    for direction in (gradient, noise.astype(np.float64)):
        length = np.linalg.norm(direction)
        if not length:
            continue
        direction = direction * (size * np.sqrt(direction.size) / length)
        claimed = float(np.sum(gradient * direction))
        measured = min(
            (_difference(value, leaf, direction, h) for h in STEPS), key=lambda m: abs(m - claimed)
        )
        scale = max(norm * size, abs(claimed), abs(measured)) or 1.0
        error = abs(measured - claimed) / scale
        if not error <= DIFFERENCED:
            raise AssertionError(
                f"gradient by {name}: {claimed:.4g} claimed, {measured:.4g} measured: "
                f"error {error:.2e} is beyond the tolerance {DIFFERENCED:.2e}"
            )


def _difference(
    value: Callable[[np.ndarray], float], leaf: np.ndarray, direction: np.ndarray, h: float
) -> float:
    ahead, behind = (value((leaf + sign * h * direction).astype(leaf.dtype)) for sign in (1, -1))
    return (ahead - behind) / (2 * h)


def check_finite_gradients(subject: Subject) -> None:
    """Gradients stay finite with inputs of zero, a row of padding alone and a row of holes alone."""
    ids = np.ones((subject.rows, subject.length), np.int32)
    ids[1], ids[2] = 0, -1
    for x in (subject.x, np.zeros_like(subject.x)):
        dy = jnp.ones(x.shape, jnp.float32)
        gradients = subject.gradient(subject.params, jnp.asarray(x), jnp.asarray(ids), dy)
        for path, leaf in jax.tree.leaves_with_path(gradients):
            if not np.all(np.isfinite(leaf)):
                raise AssertionError(
                    f"gradient{jax.tree_util.keystr(path)}: {np.sum(~np.isfinite(leaf))} not finite"
                )


def check_every_parameter(subject: Subject) -> None:
    """Every parameter has a gradient."""
    ids = jnp.ones((subject.rows, subject.length), jnp.int32)
    dy = jnp.asarray(subject.noise(4, subject.x.shape))
    gradients, _ = subject.gradient(subject.params, jnp.asarray(subject.x), ids, dy)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        if not np.any(np.asarray(leaf)):
            raise AssertionError(f"parameter{jax.tree_util.keystr(path)} has a gradient of zero")


def check_jit(subject: Subject) -> None:
    """Compiled and uncompiled agree."""
    ids = subject.documents()
    y, _ = subject.module.apply(subject.params, jnp.asarray(subject.x), segment_ids=jnp.asarray(ids))
    live = ids > 0
    expect_close("jit changes the output", subject.run(ids=ids)[live], np.asarray(y)[live], subject.limit)


def check_bfloat16(subject: Subject) -> None:
    """Computed in bfloat16, the output is bfloat16 and near that in fp32."""
    module = subject.config.build(dtype=jnp.bfloat16)
    y, _ = jax.jit(module.apply)(subject.params, jnp.asarray(subject.x, jnp.bfloat16))
    if y.dtype != jnp.bfloat16:
        raise AssertionError(f"dtype=bfloat16 gives outputs of {y.dtype}")
    rounded = np.asarray(jnp.asarray(subject.x, jnp.bfloat16).astype(jnp.float32))
    error, limit = typical(y, subject.run(rounded)), bound(jnp.bfloat16, subject.length * subject.config.dim)
    if error > limit:
        raise AssertionError(f"bfloat16 is off fp32 by {error:.2e}, beyond the tolerance {limit:.2e}")


def check_sharded(subject: Subject, *, counts: tuple[int, ...] = (8, 4, 2)) -> None:
    """Over a data axis outputs, gradients and the stream are those of one device, and no array is gathered.

    Uses the first of `counts` devices that are there; with one device there is nothing to check.
    """
    count = next((n for n in counts if n <= len(jax.devices())), None)
    if count is None:
        return
    x = subject.noise(6, (8, subject.length, subject.config.dim))
    ids = np.resize(subject.documents(), x.shape[:2])
    dy = subject.noise(7, x.shape) * (ids > 0)[..., None]
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    state = init_state(subject.config, len(x), capacity=subject.length) if subject.config.causal else None
    with jax.set_mesh(mesh):
        split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        args = (jax.device_put(subject.params, whole), jax.device_put((x, ids, dy, state), split))
        compiled = jax.jit(functools.partial(_passes, subject.module)).lower(*args).compile()
        y, gradients, streamed = jax.device_get(compiled(*args))
    expected, expected_gradients = _by_parts(subject, x, ids, dy)
    live = ids > 0
    expect_close(f"{count} devices differ from one", y[live], expected[live], subject.limit)
    for path, leaf in jax.tree.leaves_with_path(expected_gradients):
        got = functools.reduce(lambda tree, key: tree[key.key], path, gradients)
        what = f"{count} devices differ from one in the gradient{jax.tree_util.keystr(path)}"
        expect_close(what, got, leaf, subject.limit)
    if streamed is not None:
        expect_close(f"a stream over {count} devices differs", streamed[live], expected[live], subject.limit)
    if "all-gather" in (compiled.as_text() or ""):
        raise AssertionError(f"an array split over {count} devices is gathered")


def _passes(module: nn.Module, params: Any, batched: Any) -> tuple[jax.Array, Any, jax.Array | None]:
    """Outputs, gradients of <dy, y> by the parameters, and outputs of the stream."""
    x, ids, dy, state = batched
    y, back = jax.vjp(lambda p: module.apply(p, x, segment_ids=ids)[0], params)  # type: ignore[index]
    streamed = None if state is None else module.apply(params, x, segment_ids=ids, state=state)[0]  # type: ignore[index]
    return y, back(dy)[0], streamed


def _by_parts(subject: Subject, x: np.ndarray, ids: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, Any]:
    """Outputs and summed gradients of as many rows as there are, by the compiled passes of a few."""
    outputs, gradients = [], []
    for i in range(0, len(x), subject.rows):
        missing = max(i + subject.rows - len(x), 0)
        part = [
            jnp.asarray(np.pad(a[i : i + subject.rows], [(0, missing)] + [(0, 0)] * (a.ndim - 1)))
            for a in (x, ids, dy)
        ]
        outputs.append(np.asarray(subject.parallel(subject.params, *part[:2])))
        gradients.append(subject.gradient(subject.params, *part)[0])
    return np.concatenate(outputs)[: len(x)], jax.tree.map(lambda *leaves: sum(leaves), *gradients)
