"""What the tests of ops with a matrix of state per head share: rows, programs read as jaxprs, a device to lower for."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from pallas_kernels.runtime import compiling_for
from tests.pallas_kernels.op_suite import OpCase, random_cotangents, value_and_grads
from tests.tolerances import assert_close

HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
BATCH, KEY_HEADS, HEADS, KEYS, VALUES = 2, 1, 2, 3, 2


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def log_gates(seed: int, shape: tuple[int, ...]) -> Any:
    """From hardly any decay to one that leaves e^-3."""
    return jax.device_put(-np.exp(np.random.default_rng(seed).uniform(-6, 1, shape)).astype(np.float32))


def heads(length: int, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Queries, keys of length 1, values, and a state that enters."""
    k = np.random.default_rng(1).standard_normal((BATCH, length, KEY_HEADS, KEYS))
    return {
        "q": normal(0, (BATCH, length, KEY_HEADS, KEYS), dtype),
        "k": jax.device_put((k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype)),
        "v": normal(2, (BATCH, length, HEADS, VALUES), dtype),
        "initial_state": normal(3, (BATCH, HEADS, KEYS, VALUES)),
    }


def packed(length: int) -> Any:
    """Documents that start anywhere, one of a single token, a number that none has, holes, padding on all sides."""
    places = np.arange(length)
    first = 1 + np.searchsorted([3, 4, length // 2], places, side="right")
    first = np.where(places % 7 == 5, -first, first)
    second = np.where(places < 2, 0, 4 + 3 * (places >= 2 * length // 3))
    second = np.where((places > length - 3) | (places == 2 * length // 3 - 1), 0, second)
    return jax.device_put(np.stack([first, second]).astype(np.int32))


def not_tokens(arrays: dict[str, Any]) -> dict[str, Any]:
    """Where each array along time holds nothing."""
    ids = arrays["segment_ids"]
    timed = (n for n, x in arrays.items() if n not in ("segment_ids", "initial_state") and x.ndim > 2)
    return {name: np.asarray(ids) <= 0 for name in timed}


def state_case(name: str, run: Any, reference: Any, arrays: dict[str, Any]) -> OpCase:
    """Return a case of an op that multiplies each key with a state, over packed rows."""
    terms = arrays["k"].shape[1] * arrays["k"].shape[3]
    return OpCase(
        name=name,
        run=run,
        reference=reference,
        arrays=arrays,
        unused=not_tokens(arrays),
        silent=np.asarray(arrays["segment_ids"]) <= 0,
        terms=terms,
        grad_terms=2 * terms,
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of the programs inside of it too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex.core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def training_step(op: Callable[..., Any], arrays: dict[str, Any]) -> list[Any]:
    """Equations of an op with the gradients of all its float arrays, lowered for a GPU."""
    floats = {n: x for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    rest = {n: x for n, x in arrays.items() if n not in floats}

    def total(floats: dict[str, Any]) -> Any:
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(op(**floats, **rest)))

    with compiling_for(HOPPER):
        return list(equations(jax.make_jaxpr(jax.grad(total))(floats).jaxpr))


def largest(found: list[Any]) -> int:
    """Elements of the largest array that equations make."""
    return max(x.aval.size for equation in found for x in equation.outvars if hasattr(x.aval, "size"))


def dots(found: list[Any]) -> list[tuple[str, ...]]:
    """Dtypes of both operands and of the result of each matrix product."""
    products = (e for e in found if e.primitive.name == "dot_general")
    return [tuple(x.aval.dtype.name for x in (*e.invars, *e.outvars)) for e in products]


def kept_bytes(op: Callable[..., Any], arrays: dict[str, Any]) -> int:
    """What backward keeps of a call."""
    pull = jax.eval_shape(lambda arrays: jax.vjp(lambda x: op(**x), arrays)[1], arrays)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def relative_rms(actual: Any, expected: Any) -> float:
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


def check_long(run: Callable[..., Any], wide: Callable[..., Any], arrays: dict[str, Any]) -> Any:
    """Values and gradients of bf16 streams within 0.005 of those of `wide` in fp32, by root mean squares; the values.

    `wide` takes chunks: a loop over so many steps would keep the state of each.
    """
    # Unoptimised, XLA for a CPU copies what a loop returns at each turn.
    actual = value_and_grads(run, arrays, optimised=True)
    cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), random_cotangents(actual[0]))
    in_fp32 = {n: x.astype(jnp.float32) for n, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        expected = value_and_grads(wide, in_fp32, cotangents, optimised=True)
    errors = jax.tree.map(relative_rms, actual, expected)
    assert max(jax.tree.leaves(errors)) <= 0.005, errors
    return actual[0]


def check_as_the_loop(run: Callable[..., Any], loop: Callable[..., Any], arrays: dict[str, Any]) -> None:
    """Values and gradients in fp32 as one step after another makes them, over 4,096 steps."""
    in_fp32 = {n: x.astype(jnp.float32) for n, x in arrays.items()}
    found, expected = (value_and_grads(fn, in_fp32, optimised=True) for fn in (run, loop))
    terms = arrays["v"].shape[1]
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        assert_close(got, want, np.float32, terms, what=jax.tree_util.keystr(path))


def check_finite(run: Callable[..., Any], arrays: dict[str, Any]) -> None:
    """Values and gradients are numbers, and the latter are not zero in either half of the rows."""
    found = value_and_grads(run, arrays, optimised=True)
    assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in jax.tree.leaves(found))
    half = arrays["v"].shape[1] // 2
    assert all(np.any(x[:, :half]) and np.any(x[:, half:]) for x in found[1].values())
