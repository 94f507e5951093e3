"""Pool and lookup: the property suite, the written-out sums, costs and refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device
from pallas_kernels.patch_attention import explain, lookup, pool
from pallas_kernels.patch_attention.runs import find_runs, reduce_runs
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.patch_attention import naive
from tests.pallas_kernels.patch_attention.cases import lookup_arrays, lookup_case, pool_arrays, pool_case
from tests.tolerances import assert_close

MAIN = (
    pool_case("pool", pool_arrays(), "xla"),
    lookup_case("lookup_2", lookup_arrays(), "xla"),
)
MORE = (
    pool_case("pool_bf16", pool_arrays(jnp.bfloat16, size=64, capacity=16), "xla"),
    pool_case("pool_bf16_wide", pool_arrays(jnp.bfloat16, size=150, capacity=36, width=64), "xla"),
    pool_case("pool_one_slot", pool_arrays(size=6, capacity=1), "xla"),
    lookup_case("lookup_1", lookup_arrays(look_back=1, size=13), "xla"),
    lookup_case("lookup_5", lookup_arrays(look_back=5), "xla"),
    lookup_case("lookup_bf16", lookup_arrays(jnp.bfloat16, look_back=3), "xla"),
)


@pytest.mark.slow(days=28, group="properties of kernels", every=("*-reference", "lookup_2-poison"))
@pytest.mark.parametrize("check", op_suite.CHECKS)
@pytest.mark.parametrize("case", MAIN, ids=str)
def test_properties(case, check):
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("case", MORE, ids=str)
def test_values_and_gradients(case):
    op_suite.check_reference(case)
    op_suite.check_poison(case)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("check", op_suite.CHECKS)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_every_property(case, check):
    op_suite.CHECKS[check](case)


def _exact(arrays):
    return {
        n: np.asarray(x).astype(np.float64) if x.dtype == jnp.float32 else np.asarray(x)
        for n, x in arrays.items()
    }


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_pool_is_the_written_out_sum(implementation):
    arrays = pool_arrays()
    out = jax.jit(partial(pool, implementation=implementation))(**arrays)
    assert_close(out, naive.pool(**_exact(arrays)), n=arrays["k"].shape[2])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_lookup_is_the_written_out_sum(implementation):
    arrays = lookup_arrays(look_back=3)
    out = jax.jit(partial(lookup, look_back=3, implementation=implementation))(**arrays)
    assert_close(out, naive.lookup(**_exact(arrays)), n=3)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/patch_attention/test_patch_attention")
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_what_sees_nothing_is_zero_with_zero_gradient(implementation):
    arrays = pool_arrays()
    arrays["patch_ids"] = jnp.full_like(arrays["patch_ids"], arrays["q"].shape[2])
    out, grads = op_suite.value_and_grads(lambda a: pool(**a, implementation=implementation), arrays)
    assert not any(np.asarray(x).any() for x in (out, *grads.values()))

    arrays = lookup_arrays()
    arrays["valid"] = jnp.zeros_like(arrays["valid"])
    run = partial(lookup, look_back=2, implementation=implementation)
    out, grads = op_suite.value_and_grads(lambda a: run(**a), arrays)
    assert not any(np.asarray(x).any() for x in (out, *grads.values()))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("longest", [1, 8, 9, 64, 65, 700])
@pytest.mark.parametrize(("combine", "empty"), [(jnp.add, 0.0), (jnp.maximum, -1e30)])
def test_runs_of_any_length(longest, combine, empty):
    """Against one loop per run; a large run leaves no rounding error in its neighbours, and padding is not read."""
    rng = np.random.default_rng(longest)
    size, count = 701, 40
    ids = np.full((3, size), count)
    for row in ids:
        lengths = rng.integers(0, longest + 1, count)
        lengths[3] = longest
        runs = np.repeat(np.arange(count), lengths)[:size]
        row[: runs.size] = runs
    x = rng.standard_normal((*ids.shape, 2)) * np.where(ids == 3, 1e6, 1)[..., None]
    x = np.where(ids[..., None] == count, np.nan, x).astype(np.float32)
    run = jax.jit(lambda ids, x: reduce_runs(lambda pick: pick(x), find_runs(ids, count), combine, empty))
    found = np.asarray(run(jnp.asarray(ids, jnp.int32), jnp.asarray(x).reshape(-1, 2))).reshape(3, count, 2)
    exact = np.add if combine is jnp.add else np.maximum
    for n, r in np.ndindex(3, count):
        want = exact.reduce(x[n, ids[n] == r].astype(np.float64), axis=0, initial=empty)
        assert_close(found[n, r], want, n=size)


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_neither_pass_scatters(case):
    floats = {n: x for n, x in case.arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def backward(floats):
        out, vjp = jax.vjp(lambda f: case.run({**case.arrays, **f}), floats)
        return vjp(out)

    text = jax.jit(backward).lower(floats).as_text()
    assert "gather" in text
    assert "scatter" not in text


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/patch_attention/test_patch_attention")
def test_large_scores_stay_finite():
    arrays = pool_arrays()
    arrays["q"] = 1e4 * arrays["q"]
    out, grads = op_suite.value_and_grads(lambda a: pool(**a, implementation="xla"), arrays)
    assert all(np.isfinite(x).all() for x in (out, *grads.values()))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("direction", ["pool", "lookup"])
def test_memory_is_linear_in_length(direction):
    """Neither pass holds a byte-by-patch array: four times the bytes of a block take four times the memory."""

    def temporary(size: int) -> int:
        shape = (1, 1, size, 2, 8)
        few = jax.ShapeDtypeStruct((1, 1, size // 4, 2, 8), jnp.float32)
        many = jax.ShapeDtypeStruct(shape, jnp.float32)
        marks = jax.ShapeDtypeStruct(shape[:3], jnp.int32)
        valid = jax.ShapeDtypeStruct(few.shape[:3], jnp.bool_)
        bias = jax.ShapeDtypeStruct((2, 4), jnp.float32)

        def backward(q, k, v, marks, valid, bias):
            if direction == "pool":
                out, vjp = jax.vjp(lambda *a: pool(*a, marks, implementation="xla"), q, k, v)
            else:
                run = partial(lookup, look_back=4, implementation="xla")
                out, vjp = jax.vjp(lambda *a: run(*a[:3], marks, valid, a[3]), q, k, v, bias)
            return vjp(out)

        q, k = (few, many) if direction == "pool" else (many, few)
        compiled = jax.jit(backward).lower(q, k, k, marks, valid, bias).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(8192) < 1.2 * 4 * temporary(2048)


def test_the_backward_pass_keeps_no_copy_for_each_distance():
    """What lookup saves does not grow with the number of patches looked back at."""

    def saved(look_back: int) -> int:
        arrays = lookup_arrays(look_back=look_back, capacity=30 - look_back)
        q, k, v, bias = (arrays[n] for n in ("q", "k", "v", "bias"))
        run = partial(lookup, look_back=look_back, implementation="xla")
        call = lambda q, k, v, bias: run(q, k, v, arrays["latest"], arrays["valid"], bias)  # noqa: E731
        vjp = jax.jit(lambda *given: jax.vjp(call, *given)[1])(q, k, v, bias)
        return sum(x.size for x in jax.tree.leaves(vjp)) - bias.size

    assert saved(8) == saved(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: pool(**{**a, "q": a["q"][0]}), r"expected q \[B, N, P, H, K\]"),
        (
            lambda a: pool(**{**a, "patch_ids": a["patch_ids"][..., 1:]}),
            "patch_ids must name the patch of each byte",
        ),
        (lambda a: pool(**{**a, "q": a["q"].astype(jnp.bfloat16)}), "one float dtype"),
        (lambda a: pool(**a, implementation="fast"), "unknown implementation 'fast'"),
    ],
)
def test_pool_names_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(pool_arrays())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"look_back": 3}, "got look_back = 3"),
        ({"look_back": 0}, "look_back >= 1"),
        ({"latest": jnp.zeros((2, 3, 5), jnp.int32)}, "one index a byte"),
        ({"valid": jnp.zeros((2, 3, 5), bool)}, "one flag a key"),
        ({"k": jnp.zeros((2, 3, 9, 2, 4))}, r"k, v \[B, N, M, H, K\]"),
    ],
)
def test_lookup_names_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        lookup(**{**lookup_arrays(), "look_back": 2, **changes})


@pytest.mark.parametrize("direction", ["pool", "lookup"])
def test_explains(direction):
    op, hopper = f"patch_attention.{direction}", Device("gpu", (9, 0), "NVIDIA H200")
    assert explain(direction, device=hopper) == f"{op}: triton on NVIDIA H200"
    assert explain(direction).startswith(f"{op}: xla on cpu (not triton: it is compiled for")
