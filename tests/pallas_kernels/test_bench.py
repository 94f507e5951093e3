"""The benchmarks' gate and report, on shapes that a test can afford."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._bench import Plan, Work, benchmark, check
from pallas_kernels._measure import Case
from pallas_kernels.byte_head import bench as byte_head
from pallas_kernels.byte_head.shapes import ByteHeadShape
from tests.quick_timing import quick_timing

__all__ = ["quick_timing"]

KEY = jax.random.key(0)
X = (jnp.linspace(0.1, 1.0, 64),)
WORK = {"forward": Work(0.0, 8.0 * 64), "forward+backward": Work(0.0, 16.0 * 64)}


def square(x):
    return x * x


def plan(**change):
    versions = [Case("ours", lambda x: x**2, X)]
    given = {"truth": Case("truth", square, X), "plain": Case("plain", square, X), "versions": versions}
    return Plan(**{**given, "work": WORK, **change})


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str


def test_the_gate_refuses_a_wrong_value_and_a_wrong_gradient():
    assert check(plan(), KEY)["ours"] < 1e-6
    with pytest.raises(ArithmeticError, match="off"):
        check(plan(versions=[Case("off", lambda x: x**2 * 1.001, X)]), KEY)
    stopped = [Case("stopped", lambda x: x * jax.lax.stop_gradient(x), X)]
    with pytest.raises(ArithmeticError, match="stopped"):
        check(plan(versions=stopped), KEY)
    with pytest.raises(ArithmeticError, match="nan"):
        check(plan(versions=[Case("nan", lambda x: x * jnp.nan, X)]), KEY)
    slopeless = jax.custom_jvp(square)
    slopeless.defjvp(lambda x, dx: (square(x[0]), dx[0] * jnp.nan))
    with pytest.raises(ArithmeticError, match="slopeless"):
        check(plan(versions=[Case("slopeless", slopeless, X)]), KEY)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_the_report_has_every_version_in_every_pass(tmp_path, quick_timing):
    out = tmp_path / "new" / "square.json"
    text = benchmark("square", [Shape("small"), Shape("large")], lambda shape: plan(), ["--out", str(out)])
    found = json.loads(text)
    assert json.loads(out.read_text()) == found
    assert list(found["shapes"]) == ["small"]
    passes = found["shapes"]["small"]["passes"]
    assert [p["pass"] for p in passes] == list(WORK)
    for entry in passes:
        assert set(entry["seconds"]) == {"ours", "plain"}
        assert entry["flops"] == WORK[entry["pass"]].flops
        assert entry["time_over_plain"]["low"] <= entry["time_over_plain"]["high"]
        assert entry["floor"] > 0


def test_versions_can_be_chosen(quick_timing):
    both = plan(versions=[Case(name, lambda x: x**2, X) for name in ("ours", "other")])
    found = json.loads(benchmark("square", [Shape("small")], lambda shape: both, ["--versions", "other"]))
    assert {name for p in found["shapes"]["small"]["passes"] for name in p["seconds"]} == {"other", "plain"}
    with pytest.raises(ValueError, match="--versions theirs: this call has ours, other here"):
        benchmark("square", [Shape("small")], lambda shape: both, ["--versions", "theirs"])


def test_a_run_cut_short_keeps_the_shapes_it_has(tmp_path, quick_timing):
    def one_alone(shape):
        if shape.name == "large":
            raise KeyboardInterrupt
        return plan()

    out = tmp_path / "square.json"
    with pytest.raises(KeyboardInterrupt):
        benchmark(
            "square",
            [Shape("small"), Shape("large")],
            one_alone,
            ["--shapes", "small", "large", "--out", str(out)],
        )
    assert list(json.loads(out.read_text())["shapes"]) == ["small"]


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/test_bench")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_byte_head_passes_its_gate(dtype):
    errors = check(byte_head.plan(ByteHeadShape("tiny", 2, 24, 16), dtype), KEY)
    assert len(errors) == 1 + len(byte_head.CHUNKS)
