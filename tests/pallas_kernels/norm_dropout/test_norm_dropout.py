"""Norm, dropout and ReLU in one operation: the composition's values and gradients, and a mask that is a fair draw."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels._dispatch import Device
from pallas_kernels.norm_dropout import bench, explain, norm_dropout, reference, triton_gpu, xla
from pallas_kernels.norm_dropout.shapes import NormDropoutShape
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close

B, T = 8, 5
SEED = jax.device_put(np.array([3, 4_000_000_000], np.uint32))
H200 = Device("gpu", (9, 0), "NVIDIA H200")


def _case(name: str, run: Any, width: int, dtype: Any, rate: float) -> op_suite.OpCase:
    rng = np.random.default_rng(0)
    x, scale = (rng.standard_normal(shape).astype(dtype) for shape in ((B, T, width), (width,)))
    places = np.arange(B * T, dtype=np.int32).reshape(B, T)
    options = {"rate": rate, "epsilon": 1e-6}
    arrays = {"x": x, "scale": scale, "seed": SEED, "places": places}
    return op_suite.OpCase(
        name=name,
        run=lambda a: run(*(a[name] for name in arrays), **options),
        reference=lambda a: reference.norm_dropout(*(a[name] for name in arrays), **options),
        arrays=arrays,
        shared=frozenset({"scale", "seed"}),
        terms=width,
        grad_terms=width + B * T,
    )


INTERPRETED = partial(triton_gpu.norm_dropout, interpret=True)
WIDTHS = {"37": (37, jnp.float32, 0.5), "128": (128, jnp.bfloat16, 0.1), "5": (5, jnp.float32, 0.0)}
CASES, KERNELS = (
    [_case(f"{name}_{width}", run, *call) for width, call in WIDTHS.items()]
    for name, run in (("xla", xla.norm_dropout), ("triton", INTERPRETED))
)


@pytest.mark.slow(days=28, group="properties of kernels", every=("xla_128-reference", "xla_37-shard_map"))
@pytest.mark.parametrize("check", ["reference", "vmap", "shard_map", "remat"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="interpreted norm_dropout", every="triton_37-reference")
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_interpreted(case: op_suite.OpCase, check: str) -> None:
    """Without a mesh, in which the interpreter does not run: `make gpu-compile` compiles for one."""
    op_suite.CHECKS[check](case)


def test_values_are_those_of_numpy() -> None:
    x, scale = jax.random.normal(jax.random.key(1), (2, 3, 40)), jnp.full(40, 2.0)
    normal = 2 * np.asarray(x) / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6)
    assert_close(norm_dropout(x, scale), np.maximum(normal, 0), n=40)
    found = np.asarray(norm_dropout(x, scale, SEED, rate=0.25))
    kept = (found != 0) | (normal <= 0)
    assert 0.6 < kept.mean() < 1
    assert_close(found, np.where(kept, np.maximum(normal, 0) / 0.75, 0), n=40)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_entries_are_dropped_independently(rate: float) -> None:
    """Shares of dropped entries, and of both of two, are those of fair draws within five standard deviations."""

    def dropped(seed: Any) -> Any:
        return np.asarray(norm_dropout(jnp.ones((1024, 512)), jnp.ones(512), seed, rate=rate)) == 0

    one, seeds = dropped(SEED), ((4, 4_000_000_000), (3, 4_000_000_002), (0, 0))
    others = [dropped(jax.device_put(np.array(seed, np.uint32))) for seed in seeds]
    pairs = [
        (one[i:, j:], one[: 1024 - i, : 512 - j])
        for i, j in ((0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (512, 0))
    ]
    pairs += [(one, other) for other in others]
    for share, expected in [(z.mean(), rate) for z in (one, *others)] + [
        ((a & b).mean(), rate**2) for a, b in pairs
    ]:
        assert abs(share - expected) < 5 * (expected * (1 - expected) / (one.size / 2)) ** 0.5
    for axis in (0, 1):
        count = one.shape[1 - axis] * rate
        deviation = (count * (1 - rate)) ** 0.5
        assert np.abs(one.sum(1 - axis) - count).max() < 6 * deviation
        assert abs(one.sum(1 - axis).std() / deviation - 1) < 0.2


@pytest.mark.parametrize("run", [norm_dropout, INTERPRETED], ids=["xla", "triton"])
def test_a_share_of_rows_draws_as_the_whole_does(run: Any) -> None:
    """Odd rows too, which fill no tile."""
    x = jax.random.normal(jax.random.key(0), (211, 48))
    options = {"rate": 0.5, "epsilon": 1e-6}
    whole = np.asarray(reference.norm_dropout(x, jnp.ones(48), SEED, **options))
    part = np.asarray(run(x[77:], jnp.ones(48), SEED, places=jnp.arange(77, 211), **options))
    np.testing.assert_array_equal(part == 0, whole[77:] == 0)
    assert_close(run(x, jnp.ones(48), SEED, **options), whole, n=48)


def test_no_rows() -> None:
    grads = jax.grad(lambda x, s: norm_dropout(x, s, SEED, rate=0.5).sum(), (0, 1))(
        jnp.ones((2, 0, 3)), jnp.ones(3)
    )
    assert grads[0].shape == (2, 0, 3)
    np.testing.assert_array_equal(grads[1], 0)
    assert "counts entries from 1" in explain(
        jax.ShapeDtypeStruct((0, 3), jnp.float32), jnp.ones(3), device=H200
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"scale": jnp.ones(3)},
            r"expected x \[..., D\] and scale \[D\] with D >= 1, got \(2, 4\) and \(3,\)",
        ),
        ({"x": jnp.ones((2, 4), jnp.int32)}, "floating point, got int32 and float32: cast"),
        ({"rate": 1.0}, "rate must be from 0 to below 1, got 1.0"),
        ({"rate": -0.1}, "rate must be from 0 to below 1, got -0.1"),
        ({"rate": float("nan")}, "rate must be finite"),
        ({"epsilon": 0.0}, "epsilon must be above 0, got 0.0"),
        ({"seed": None}, "rate 0.5 drops at random: give a seed"),
        ({"seed": jnp.zeros(2, jnp.int32)}, r"seed must be two numbers of uint32, got int32 of shape \(2,\)"),
        ({"places": jnp.zeros(3, jnp.int32)}, r"of shape \(2,\), got int32 of shape \(3,\)"),
        ({"implementation": "triton"}, "cannot run here: it is compiled for compute capability 9.0"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm_dropout(**{"x": jnp.ones((2, 4)), "scale": jnp.ones(4), "seed": SEED, "rate": 0.5, **change})


@pytest.mark.parametrize(
    ("width", "dtype", "said"),
    [
        (8192, jnp.bfloat16, "triton on"),
        (8193, jnp.float32, "8192 at most, not 8193"),
        (64, jnp.float16, "is float16"),
    ],
)
def test_explain_says_which_and_why(width: int, dtype: Any, said: str) -> None:
    x, scale = jax.ShapeDtypeStruct((8, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    assert said in explain(x, scale, device=H200)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("width", [5, 37, 768, 8192])
def test_on_a_gpu(width: int, check: str) -> None:
    def run(*arrays: Any, **options: Any) -> Any:
        return norm_dropout(*arrays[:3], places=arrays[3], implementation="triton", **options)

    op_suite.CHECKS[check](_case("triton", run, width, jnp.bfloat16, 0.1))


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    plan = bench.plan(NormDropoutShape("tiny", 2, 33, 96), interpret=True)
    assert set(check(plan, jax.random.key(0))) == {"plain", "xla", "triton"}
