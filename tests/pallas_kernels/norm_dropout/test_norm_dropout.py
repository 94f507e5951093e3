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

B, T, BF16 = 8, 5, jnp.bfloat16
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
WIDTHS = {"37": (37, jnp.float32, 0.5), "128": (128, BF16, 0.1), "5": (5, jnp.float32, 0.0)}
CASES, KERNELS = (
    [_case(f"{name}_{width}", run, *call) for width, call in WIDTHS.items()]
    for name, run in (("xla", xla.norm_dropout), ("triton", INTERPRETED))
)


@pytest.mark.slow(days=28, group="properties of kernels", every="xla_128-reference")
@pytest.mark.parametrize("check", ["reference", "vmap", "shard_map", "remat"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="interpreted norm_dropout")
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_interpreted(case: op_suite.OpCase, check: str) -> None:
    """Without a mesh, in which the interpreter does not run: `make gpu-compile` compiles for one."""
    op_suite.CHECKS[check](case)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_entries_are_dropped_independently(rate: float) -> None:
    """Shares of dropped entries, and of both of two, are those of fair draws within five standard deviations."""
    run = jax.jit(lambda x, seed: norm_dropout(x, x[0], seed, rate=rate))

    def dropped(seed: Any) -> Any:
        return np.asarray(run(np.ones((1024, 512), np.float32), seed)) == 0

    one, seeds = dropped(SEED), ((4, 4_000_000_000), (3, 4_000_000_002), (0, 0))
    others = [dropped(jax.device_put(np.array(seed, np.uint32))) for seed in seeds]
    shifts = ((0, 1), (1, 0), (0, 2), (1, 1), (2, 0), (512, 0))
    pairs = [(one[i:, j:], one[: 1024 - i, : 512 - j]) for i, j in shifts] + [(one, z) for z in others]
    found = [(z.mean(), rate) for z in (one, *others)] + [((a & b).mean(), rate**2) for a, b in pairs]
    for share, expected in found:
        assert abs(share - expected) < 5 * (expected * (1 - expected) / (one.size / 2)) ** 0.5
    for axis in (0, 1):
        count = one.shape[1 - axis] * rate
        deviation = (count * (1 - rate)) ** 0.5
        assert np.abs(one.sum(1 - axis) - count).max() < 6 * deviation
        assert abs(one.sum(1 - axis).std() / deviation - 1) < 0.2


@pytest.mark.parametrize("run", [norm_dropout, INTERPRETED], ids=["xla", "triton"])
def test_a_share_of_rows_draws_as_the_whole_does(run: Any) -> None:
    """Odd rows too, which fill no tile."""
    x, scale = np.random.default_rng(0).standard_normal((211, 48), np.float32), np.ones(48, np.float32)
    run, textbook = (jax.jit(partial(op, rate=0.5, epsilon=1e-6)) for op in (run, reference.norm_dropout))
    whole = textbook(x, scale, SEED)
    part = run(x[77:], scale, SEED, places=np.arange(77, 211, dtype=np.int32))
    assert_close(part, whole[77:], n=48)
    assert_close(run(x, scale, SEED), whole, n=48)


def test_no_rows() -> None:
    x, scale = jnp.ones((2, 0, 3)), jnp.ones(3)
    gradients = jax.jit(jax.grad(lambda x, s: norm_dropout(x, s, SEED, rate=0.5).sum(), (0, 1)))(x, scale)
    assert gradients[0].shape == x.shape
    np.testing.assert_array_equal(gradients[1], 0)
    assert "counts entries from 1" in explain(x, scale, device=H200)


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


def test_the_kernel_says_which_calls_it_takes() -> None:
    calls = (
        (8192, BF16, "triton on"),
        (8193, BF16, "8192 at most, not 8193"),
        (64, jnp.float16, "x is float16"),
    )
    for width, dtype, said in calls:
        assert said in explain(jnp.ones((2, width), dtype), jnp.ones(width), device=H200)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("check", ["reference", "vmap", "remat"])
@pytest.mark.parametrize("width", [5, 37, 768, 8192])
def test_on_a_gpu(width: int, check: str) -> None:
    def run(*arrays: Any, **options: Any) -> Any:
        return norm_dropout(*arrays[:3], places=arrays[3], implementation="triton", **options)

    op_suite.CHECKS[check](_case("triton", run, width, BF16, 0.1))


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    plan = bench.plan(NormDropoutShape("tiny", 2, 33, 96), interpret=True)
    assert set(check(plan, jax.random.key(0))) == {"plain", "xla", "triton"}
