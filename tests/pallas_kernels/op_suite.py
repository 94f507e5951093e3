"""The property suite of every op: describe a call as an `OpCase`, run each of `CHECKS` on it.

@pytest.mark.parametrize("check", op_suite.CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_op(case, check):
    op_suite.CHECKS[check](case)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from tests.tolerances import assert_close

LARGE = 5_000
"""Numbers of a call from which its reference runs longer than an optimising compiler."""

Arrays = dict[str, Any]
Run = Callable[[Arrays], Any]


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One call of an op, on given arrays.

    Attributes:
      name: shown by pytest.
      run: the op under test, as a function of the named arrays; returns an array or a pytree of arrays.
      reference: the same by an independent or textbook way; it is given float arrays as fp32.
      arrays: by name. Float arrays are differentiated. Those not in `shared` have a leading batch axis.
      shared: names of arrays without batch axis (filters, slopes).
      unused: for some of the arrays, True where nothing may be read (padding); one check poisons it with NaN.
      silent: True where the result, the first if there are several, is zero whatever the arrays are; the same check
        poisons its cotangent there.
      terms: length of the longest reduction, for the tolerance of values.
      grad_terms: the same for gradients; `terms` if None.
    """

    name: str
    run: Run
    reference: Run
    arrays: Mapping[str, Any]
    shared: frozenset[str] = frozenset()
    unused: Mapping[str, Any] = field(default_factory=dict)
    silent: Any = None
    terms: int = 1
    grad_terms: int | None = None

    def __str__(self) -> str:
        return self.name


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _split(arrays: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    floats = {name: x for name, x in arrays.items() if _is_float(x)}
    return floats, {name: x for name, x in arrays.items() if name not in floats}


def _in_fp32(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(x, np.float32) if _is_float(x) else x for name, x in arrays.items()}


def random_cotangents(out: Any, seed: int = 0) -> Any:
    """Standard normal numbers of the shapes and dtypes of `out`."""
    rng = np.random.default_rng(seed)
    # Cast on the host and put on the device: jnp.asarray compiles a program for each shape
    return jax.tree.map(lambda x: jax.device_put(rng.standard_normal(x.shape).astype(x.dtype)), out)


def value_and_grads(
    run: Run, arrays: Mapping[str, Any], cotangents: Any = None, *, optimised: bool = False
) -> tuple[Any, Any]:
    """Outputs, and the gradients of every float array under fixed random cotangents (or those given).

    `optimised` compiles for a long run, which on a CPU the suite's flags (conftest) do not.
    """
    floats, others = _split(arrays)
    if cotangents is None:
        cotangents = random_cotangents(jax.eval_shape(lambda f, o: run({**f, **o}), floats, others))
    return _jitted_gradients(run, optimised and jax.default_backend() == "cpu")(floats, others, cotangents)


def reference_and_grads(case: OpCase, arrays: Mapping[str, Any], cotangents: Any = None) -> tuple[Any, Any]:
    """Return `value_and_grads` of the case's reference for these arrays, optimised where it runs long."""
    large = sum(x.size for x in arrays.values()) > LARGE
    return value_and_grads(case.reference, arrays, cotangents, optimised=large)


@lru_cache(maxsize=64)
def _jitted_gradients(run: Run, optimised: bool) -> Callable[..., tuple[Any, Any]]:
    """Jitted once for each function, so that the checks of one case share it."""

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1} if optimised else None)
    def backward(floats: Arrays, others: Arrays, cotangents: Any) -> tuple[Any, Any]:
        out, vjp = jax.vjp(lambda f: run({**f, **others}), floats)
        cotangents = jax.tree.map(lambda c, o: jnp.asarray(c, o.dtype), cotangents, out)
        return out, vjp(cotangents)[0]

    return backward


def _dtype(arrays: Mapping[str, Any]) -> Any:
    """The coarsest float dtype among the inputs: that which results are rounded to."""
    return max((x.dtype for x in arrays.values() if _is_float(x)), key=lambda d: float(jnp.finfo(d).eps))


def _compare(case: OpCase, actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    dtype = _dtype(case.arrays)
    for got, want in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(expected[0]), strict=True):
        assert got.shape == want.shape, f"output of shape {got.shape}, expected {want.shape}"
        assert_close(got, want, dtype, case.terms, "values")
    assert set(actual[1]) == set(expected[1])
    for name, want in expected[1].items():
        got = actual[1][name]
        assert got.dtype == case.arrays[name].dtype, f"gradient of {name} has dtype {got.dtype}"
        assert_close(got, want, dtype, case.grad_terms or case.terms, f"gradient of {name}")


def check_reference(case: OpCase) -> None:
    """Values and gradients, jitted, against the reference."""
    actual = value_and_grads(case.run, case.arrays)
    cotangents = jax.tree.map(lambda x: np.asarray(x, np.float32), random_cotangents(actual[0]))
    expected = reference_and_grads(case, _in_fp32(case.arrays), cotangents)
    _compare(case, actual, expected)


def check_vmap(case: OpCase) -> None:
    """vmap over two different batches gives, values and gradients, what two calls give."""
    first = {n: np.asarray(x) for n, x in case.arrays.items()}
    second = {n: x if n in case.shared else np.roll(x, 1, axis=0) for n, x in first.items()}
    second = {n: x * np.asarray(0.5, x.dtype) if _is_float(x) else x for n, x in second.items()}
    stacked = {n: np.stack([first[n], second[n]]) for n in first}
    out, grads = jax.device_get(value_and_grads(jax.vmap(case.run), stacked))
    cotangents = jax.device_get(random_cotangents(out))
    for i, arrays in enumerate((first, second)):
        row = (jax.tree.map(lambda x, i=i: x[i], out), jax.tree.map(lambda x, i=i: x[i], grads))
        cotangent = jax.tree.map(lambda x, i=i: x[i], cotangents)
        _compare(case, row, value_and_grads(case.run, arrays, cotangent))


def check_shard_map(case: OpCase) -> None:
    """Each device on its own rows: values and gradients (those of shared arrays summed) as on one device."""
    batch = next(x.shape[0] for n, x in case.arrays.items() if n not in case.shared)
    devices = max(d for d in range(1, jax.device_count() + 1) if batch % d == 0)
    assert devices > 1, (
        f"{case.name}: a batch of {batch} rows cannot be split over {jax.device_count()} devices"
    )
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    specs = {n: PartitionSpec() if n in case.shared else PartitionSpec("data") for n in case.arrays}
    sharded = jax.shard_map(
        case.run, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec("data"), check_vma=True
    )
    _compare(case, value_and_grads(sharded, case.arrays), value_and_grads(case.run, case.arrays))


def check_remat(case: OpCase) -> None:
    """Under jax.checkpoint, where everything is computed twice, the same values and gradients."""
    _compare(
        case, value_and_grads(jax.checkpoint(case.run), case.arrays), value_and_grads(case.run, case.arrays)
    )


def _poisoned(x: Any, mask: Any) -> tuple[Any, Any]:
    """x with zeros, and with NaN, where `mask`, of some of its leading axes, is True."""
    x, mask = np.asarray(x), np.asarray(mask)
    mask = np.reshape(mask, mask.shape + (1,) * (x.ndim - mask.ndim))
    return tuple(np.where(mask, np.full((), value, x.dtype), x) for value in (0, np.nan))


def check_poison(case: OpCase) -> None:
    """NaN in what may not be read changes nothing, and gets a gradient of zero; so do cotangents of nothing."""
    clean, dirty = dict(case.arrays), dict(case.arrays)
    for name, mask in case.unused.items():
        clean[name], dirty[name] = _poisoned(case.arrays[name], mask)
    (first, *rest), tree = jax.tree.flatten(random_cotangents(jax.eval_shape(case.run, case.arrays)))
    pair = (first, first) if case.silent is None else _poisoned(first, case.silent)
    quiet, loud = (jax.tree.unflatten(tree, (each, *rest)) for each in pair)
    out, grads = value_and_grads(case.run, dirty, loud)
    expected = value_and_grads(case.run, clean, quiet)
    _compare(case, (out, grads), expected)
    if case.silent is not None:
        result, mask = (np.asarray(z) for z in (jax.tree.leaves(out)[0], case.silent))
        assert not np.any(result[mask].astype(np.float32)), "a result that should be silent"
    for name, mask in case.unused.items():
        assert not np.any(np.asarray(grads[name], np.float32)[np.asarray(mask)]), f"gradient of unused {name}"


CHECKS: dict[str, Callable[[OpCase], None]] = {
    "reference": check_reference,
    "vmap": check_vmap,
    "shard_map": check_shard_map,
    "remat": check_remat,
    "poison": check_poison,
}
