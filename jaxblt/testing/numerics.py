"""Properties of gradients, dtypes, compilation and sharding."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxblt.mixers.driver.base import init_state
from jaxblt.testing.subject import Subject, expect_close
from jaxblt.testing.tolerances import DIFFERENCED, bound, typical

STEPS = (4e-2, 2e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3, 6e-4, 3e-4)
"""Steps of the differences, in units of a parameter's size, each half of the one before. One pair is to be small enough
for the curvature and large enough for fp32, whose sums differ from one processor to another. A wrong gradient agrees
with none."""


def check_gradients(subject: Subject) -> None:
    """Check gradients by inputs and by each parameter against central differences.

    <dy, y> is differenced along the gradient, which shows a wrong size, and along a random direction, which shows
    what is missing. Sums are in f64, and two steps make a difference of fourth order, so that an error of 1 % shows
    although passes are in fp32. Hard choices that a mixer passes through `jaxblt.mixers.driver.choices.held` stay.
    """
    for leaf in range(len(jax.tree.leaves(subject.params)) + 1):
        expect_derivative(subject, [leaf])


def check_whole_gradient(subject: Subject) -> None:
    """Check gradients with inputs and all parameters moved at once: few passes, one sum."""
    expect_derivative(subject, range(len(jax.tree.leaves(subject.params)) + 1))


def expect_derivative(subject: Subject, moved: Sequence[int]) -> None:
    """Compare gradients by some leaves with differences along two directions.

    Leaves are counted with the inputs as the last.
    """
    ids = subject.with_holes(subject.documents())
    dy = subject.noise(4, subject.x.shape) * (ids > 0)[..., None]
    paths = jax.tree.leaves_with_path(subject.params)
    names = [*("params" + jax.tree_util.keystr(path) for path, _ in paths), "x"]
    point = [*(np.asarray(leaf) for _, leaf in paths), subject.x]
    found = subject.gradient(subject.params, subject.x, ids, dy)
    gradients = {i: np.asarray(jax.tree.leaves(found)[i], np.float64) for i in moved}

    def value(directions: dict[int, np.ndarray], h: float) -> float:
        at = [
            (leaf + h * directions[i]).astype(leaf.dtype) if i in directions else leaf
            for i, leaf in enumerate(point)
        ]
        params = jax.tree.unflatten(jax.tree.structure(subject.params), at[:-1]) | subject.choices
        y = subject.parallel(params, at[-1], ids)
        return float(np.sum(np.asarray(y, np.float64) * dy))

    sizes = {i: float(np.sqrt(np.mean(point[i].astype(np.float64) ** 2))) or 1.0 for i in moved}
    noise = {i: subject.noise(5 + i, point[i].shape).astype(np.float64) for i in moved}
    typical_derivative = sum(sizes[i] * float(np.linalg.norm(gradients[i])) for i in moved)
    for raw in (gradients, noise):
        directions = {i: _of_size(raw[i], sizes[i]) for i in moved}
        claimed = sum(float(np.sum(gradients[i] * directions[i])) for i in moved)
        errors = []
        for measured in _derivatives(functools.partial(value, directions)):
            scale = max(typical_derivative, abs(claimed), abs(measured)) or 1.0
            errors.append((abs(measured - claimed) / scale, measured))
            if errors[-1][0] <= DIFFERENCED:
                break
        else:
            error, measured = min(errors)
            raise AssertionError(
                f"gradient by {', '.join(names[i] for i in moved)}: {claimed:.4g} claimed, {measured:.4g} measured: "
                f"error {error:.2e} is beyond the tolerance {DIFFERENCED:.2e}"
            )


def _of_size(direction: np.ndarray, size: float) -> np.ndarray:
    """Scale `direction` to a root mean square of `size`; zero stays zero."""
    length = float(np.linalg.norm(direction))
    return direction * (size * np.sqrt(direction.size) / length) if length else direction


def _derivatives(value: Callable[[float], float]) -> Iterator[float]:
    """Yield derivatives at 0 by each pair of neighbouring steps.

    They are Richardson's extrapolation to a step of 0.
    """
    central = ((value(h) - value(-h)) / (2 * h) for h in STEPS)
    for coarse, fine in itertools.pairwise(central):
        yield (4 * fine - coarse) / 3


def check_finite_gradients(subject: Subject) -> None:
    """Check that gradients stay finite for zero inputs, padding only and holes only."""
    ids = np.ones((subject.rows, subject.length), np.int32)
    ids[1], ids[2] = 0, -1
    for x in (subject.x, np.zeros_like(subject.x)):
        gradients = subject.gradient(subject.params, x, ids, np.ones_like(x))
        for path, leaf in jax.tree.leaves_with_path(gradients):
            if not np.all(np.isfinite(leaf)):
                raise AssertionError(
                    f"gradient{jax.tree_util.keystr(path)}: {np.sum(~np.isfinite(leaf))} not finite"
                )


def check_every_parameter(subject: Subject) -> None:
    """Check that every parameter has a gradient, of the output or of a loss that the mixer sows."""
    x, ids = jnp.asarray(subject.x), jnp.ones((subject.rows, subject.length), jnp.int32)
    dy = jnp.asarray(subject.noise(4, subject.x.shape))
    gradients, _ = subject.gradient(subject.params, x, ids, dy)
    unmoved = [path for path, leaf in jax.tree.leaves_with_path(gradients) if not np.any(np.asarray(leaf))]
    if not unmoved:
        return

    def sown(params: Any) -> Float[Array, ""]:
        _, side = subject.module.apply(params, x, segment_ids=ids, mutable=["losses"])
        return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(side)), jnp.zeros(()))

    by_losses = dict(jax.tree.leaves_with_path(jax.jit(jax.grad(sown))(subject.params)))
    for path in unmoved:
        if not np.any(np.asarray(by_losses[path])):
            raise AssertionError(f"parameter{jax.tree_util.keystr(path)} has a gradient of zero")


def check_jit(subject: Subject) -> None:
    """Check that compiled and uncompiled agree."""
    ids = subject.documents()
    y, _ = subject.module.apply(subject.params, jnp.asarray(subject.x), segment_ids=jnp.asarray(ids))
    live = ids > 0
    expect_close("jit changes the output", subject.run(ids=ids)[live], np.asarray(y)[live], subject.limit)


def check_bfloat16(subject: Subject) -> None:
    """Check that in bfloat16 the output is bfloat16 and near that in fp32."""
    module = subject.config.build(dtype=jnp.bfloat16)
    y, _ = jax.jit(module.apply)(subject.params, jnp.asarray(subject.x, jnp.bfloat16))
    if y.dtype != jnp.bfloat16:
        raise AssertionError(f"dtype=bfloat16 gives outputs of {y.dtype}")
    narrow = np.asarray(jnp.asarray(subject.x, jnp.bfloat16).astype(jnp.float32))
    error, limit = typical(y, subject.run(narrow)), bound(jnp.bfloat16, subject.length * subject.config.dim)
    if error > limit:
        raise AssertionError(f"bfloat16 is off fp32 by {error:.2e}, beyond the tolerance {limit:.2e}")


def check_sharded(subject: Subject, *, counts: tuple[int, ...] = (8, 4, 2)) -> None:
    """Check outputs, gradients and the stream over a data axis, where no array is gathered.

    Uses the first of `counts` devices that are there.
    """
    count = next(n for n in counts if n <= jax.device_count())
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
    """Return outputs, gradients of <dy, y> by the parameters, and outputs of the stream."""
    x, ids, dy, state = batched
    y, back = jax.vjp(lambda p: module.apply(p, x, segment_ids=ids)[0], params)  # type: ignore[index]
    streamed = None if state is None else module.apply(params, x, segment_ids=ids, state=state)[0]  # type: ignore[index]
    return y, back(dy)[0], streamed


def _by_parts(subject: Subject, x: np.ndarray, ids: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return outputs and summed gradients of all rows, by the compiled passes of a few."""
    outputs, gradients = [], []
    for i in range(0, len(x), subject.rows):
        missing = max(i + subject.rows - len(x), 0)
        part = [
            np.pad(a[i : i + subject.rows], [(0, missing)] + [(0, 0)] * (a.ndim - 1)) for a in (x, ids, dy)
        ]
        outputs.append(np.asarray(subject.parallel(subject.params, *part[:2])))
        gradients.append(jax.device_get(subject.gradient(subject.params, *part)[0]))
    return np.concatenate(outputs)[: len(x)], jax.tree.map(lambda *leaves: sum(leaves), *gradients)
