"""The scan and its gradient against one step after another, at lengths on every side of the chunks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels._bench import check
from pallas_kernels.linear_scan import bench, linear_scan
from pallas_kernels.linear_scan.reference import linear_scan_reference
from pallas_kernels.linear_scan.shapes import LinearScanShape
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close


def arrays(
    *shape: int, dtype: Any = jnp.float32, shared: bool = False, initial: bool = False
) -> dict[str, Any]:
    """Factors between 0 and 1, some of them zero as where a document begins."""
    rng = np.random.default_rng(0)
    rows = (1, *shape[1:]) if shared else shape
    a = rng.uniform(0.2, 1.0, rows) * (rng.uniform(size=rows) > 0.1)
    found = {
        name: jax.device_put(z.astype(dtype)) for name, z in (("a", a), ("b", rng.standard_normal(shape)))
    }
    if initial:
        found["initial"] = jax.device_put(rng.standard_normal((*shape[:-2], shape[-1])).astype(np.float32))
    return found


def _case(name: str, given: dict[str, Any], *, shared: bool = False, **options: Any) -> op_suite.OpCase:
    length = given["b"].shape[-2]
    return op_suite.OpCase(
        name=name,
        run=lambda x: linear_scan(**x, **options),
        reference=lambda x: linear_scan_reference(**x, **options),
        arrays=given,
        shared=frozenset({"a"} if shared else ()),
        terms=length,
        grad_terms=2 * length * (given["b"].shape[0] if shared else 1),
    )


CASES = [
    _case("initial", arrays(8, 21, 5, initial=True)),
    _case("reverse", arrays(8, 21, 5, initial=True), reverse=True),
    _case("channel_major_shared", arrays(8, 2, 70, 3, shared=True), shared=True),
    _case("bfloat16", arrays(8, 16, 4, dtype=jnp.bfloat16)),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="*-reference")
@pytest.mark.parametrize("check", [name for name in op_suite.CHECKS if name != "poison"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="properties of kernels", every="65")
@pytest.mark.parametrize("length", [1, 2, 8, 9, 64, 65])
def test_any_length(length: int) -> None:
    op_suite.check_reference(_case(str(length), arrays(2, length, 3, initial=True)))


def test_pieces_are_one_stream() -> None:
    x, run = jax.device_get(arrays(2, 21, 3)), jax.jit(linear_scan)
    whole, state, found = run(**x), np.zeros((2, 3), np.float32), []
    for start, stop in ((0, 1), (1, 8), (8, 21)):
        found.append(np.asarray(run(x["a"][:, start:stop], x["b"][:, start:stop], initial=state)))
        state = found[-1][:, -1]
    assert_close(np.concatenate(found, 1), whole, n=21)


@pytest.mark.slow(days=28, group="properties of kernels", every="21")
@pytest.mark.parametrize("length", [8, 21])
def test_a_factor_of_zero_forgets_what_is_not_finite(length: int) -> None:
    """NaN in one of three documents, and in the state before them, gets into no other one, nor into its gradient."""
    x = arrays(1, length, 3, initial=True)
    x["a"] = x["a"].at[:, jnp.asarray([0, 3, 6])].set(0.0)

    @jax.jit
    def squared(b: Any, initial: Any) -> Any:
        h, pull = jax.vjp(lambda b: linear_scan(x["a"], b, initial=initial), b)
        return h, pull(h)[0]

    poisoned = (x["b"].at[:, 4].set(jnp.nan), x["initial"] * jnp.nan)
    expected = squared(x["b"], x["initial"])
    plain = linear_scan(x["a"], poisoned[0], initial=poisoned[1], implementation="reference")
    others = np.delete(np.arange(length), slice(3, 6))
    for got, want in zip((*squared(*poisoned), plain), (*expected, expected[0]), strict=True):
        assert np.isnan(got[:, 4]).any()
        assert_close(got[:, others], want[:, others], n=length)


def test_sums_are_wide() -> None:
    """In bf16 a sum of ones stands still at 256."""
    ones = jnp.ones((1, 1024, 1), jnp.bfloat16)
    h = jax.jit(linear_scan)(ones, ones)
    assert h.dtype == jnp.float32
    np.testing.assert_array_equal(h[0, :, 0], np.arange(1, 1025))


def test_nothing_is_kept_but_the_factors_and_the_states() -> None:
    x = arrays(2, 512, 4)
    _, backward = jax.vjp(jax.jit(linear_scan), x["a"], x["b"])
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) <= 2 * x["b"].nbytes


@pytest.mark.slow(days=28, group="properties of kernels")
def test_a_gradient_has_a_gradient() -> None:
    x = arrays(1, 9, 2)

    def norm(implementation: Any, a: Any, b: Any) -> Any:
        run = partial(linear_scan, implementation=implementation)
        grads = jax.grad(lambda a, b: (run(a, b) ** 2).sum(), (0, 1))(a, b)
        return sum((g**2).sum() for g in grads)

    found, expected = (
        jax.jit(jax.grad(partial(norm, name), (0, 1)))(x["a"], x["b"]) for name in (None, "reference")
    )
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, n=4 * 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": jnp.ones((2, 4, 2))}, r"a must have b's shape \(2, 4, 3\)"),
        ({"a": jnp.ones((4, 3))}, "a must have b's shape"),
        ({"b": jnp.ones((2, 4, 3), jnp.int32)}, "b must be floating point, got int32"),
        ({"b": jnp.ones((2, 0, 3))}, "each at least 1"),
        ({"initial": jnp.ones((2, 4))}, r"initial must be b without time, \(2, 3\)"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_scan(**{"a": jnp.ones((2, 4, 3)), "b": jnp.ones((2, 4, 3)), **change})


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    errors = check(bench.plan(LinearScanShape("tiny", 2, 20, 4), interpret=True), jax.random.key(0))
    assert set(errors) == {"xla", "mosaic_gpu"}


def test_gradients_of_an_island_in_a_loop_compile() -> None:
    """Constants as large as the states would leave the loop as results of an island without arguments.

    Shardy of jax 0.11.2 crashes on some of these.
    """
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    rows = PartitionSpec("data")

    def loss(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.shard_map(linear_scan, in_specs=(rows, rows), out_specs=rows)(x, x), None

        return jnp.sum(jax.lax.scan(body, x, length=1)[0])

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((2, 16, 1), jnp.float32, sharding=NamedSharding(mesh, rows))
        assert jax.jit(jax.grad(loss)).lower(x).compile() is not None
