"""Timing: by a clock that the tests set, nothing hoisted or dropped, the right gradients."""

import json
from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _measure, _trace
from pallas_kernels._measure import (
    Case,
    compare,
    compiled,
    forward_backward,
    measure,
    measure_all,
)
from pallas_kernels._trace import union_length
from tests.quick_timing import TRIAL_S, quick_timing
from tests.tolerances import tol

__all__ = ["quick_timing"]


class Clock:
    """Time that passes where a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, x: jax.Array, turns: int) -> jax.Array:
        """`turns` operations of a millisecond each, which a compiler may drop or move as any other."""

        def tick(x: Any) -> Any:
            self.sleep(1e-3)
            return x

        for _ in range(turns):
            x = jax.pure_callback(tick, x, x + 1)
        return x


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_measure, "time", clock)
    return clock


def test_each_trial_is_a_call(clock: Clock) -> None:
    result = measure(clock.sleep, 0.005, method="host", warmup=1)
    assert result.seconds == pytest.approx([0.005] * 20)
    assert result.summary.trials == 20
    assert clock.now == pytest.approx(21 * 0.005)


def test_processor_time_is_that_of_another_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "process_time", lambda: clock.now / 4, raising=False)
    result = measure(clock.sleep, 0.004, method="processor", warmup=1)
    assert result.seconds == pytest.approx([0.001] * 20)
    assert result.method == "processor"


def test_an_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="one of profiler, slope, calls, host, processor, got 'cpu'"):
        measure(jnp.sin, jnp.ones(3), method="cpu")  # pyright: ignore[reportArgumentType]


def test_comparison_finds_a_known_ratio(clock: Clock) -> None:
    slow, fast = Case("slow", clock.sleep, (0.04,)), Case("fast", clock.sleep, (0.01,))
    result = compare(slow, fast, method="host", warmup=1)
    assert (result.low, result.ratio, result.high) == pytest.approx((4, 4, 4))


def test_rounds_alternate() -> None:
    calls: list[str] = []
    cases = [Case(name, lambda name=name: calls.append(name)) for name in "ab"]
    compare(*cases, method="host", warmup=0)
    assert "".join(calls) == "abba" * 10


def test_calls_are_timed_one_after_the_other_and_long_ones_alone(clock: Clock) -> None:
    short, long = Case("short", clock.sleep, (0.002,)), Case("long", clock.sleep, (0.31,))
    found = measure_all([short, Case("same", clock.sleep, (0.002,))], method="calls", warmup=0)
    assert [side.name for side in found] == ["short", "same"]
    for side in found:
        assert side.method == "calls"
        assert side.seconds == pytest.approx([0.002] * 20)
    before = clock.now
    assert _measure._slope_timer(_measure._called(long), 0, 0.01)() == pytest.approx(0.31)
    assert clock.now - before == pytest.approx(3 * 0.31)


def test_eight_times_the_work_takes_eight_times_as_long(clock: Clock) -> None:
    eight, one = (Case(str(n), lambda x, n=n: clock.work(x, n), (jnp.ones(3),)) for n in (8, 1))
    result = compare(eight, one, method="slope", warmup=1)
    assert result.second.summary.median == pytest.approx(1e-3)
    assert result.ratio == pytest.approx(8)
    assert result.first.span is None


def test_slope_neither_hoists_invariant_inputs_nor_drops_unused_outputs(clock: Clock) -> None:
    """No turn's result is read by the next, yet each turn costs what a call costs."""
    run = _measure._repeated(Case("fn", lambda x, y: (clock.work(x, 2), y + 1), (jnp.ones(3), jnp.ones(8))))
    for turns in (1, 7):
        before = clock.now
        run(turns)
        assert clock.now - before == pytest.approx(2e-3 * turns)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/test_measure")
def test_the_profiler_sees_each_call() -> None:
    x = jnp.ones((64, 64))
    eight, one = (Case(str(n), lambda x, n=n: _matmuls(x, n), (x,)) for n in (8, 1))
    for side in measure_all([eight, one], method="profiler", warmup=1):
        assert len(side.seconds) == 20
        assert min(side.seconds) > 0
        assert side.span is not None
        assert side.span >= side.summary.median


def _matmuls(x: jax.Array, count: int) -> jax.Array:
    for _ in range(count):
        x = jnp.tanh(x @ x)
    return x


def test_device_time_is_of_the_call_that_started_it_and_the_slowest_device() -> None:
    """Operations of two calls, on two GPUs: the first's overlap on one of them, with a gap on the other."""

    def plane(name: str, line: str, *events: tuple[str, float, float]) -> Any:
        fields = ("name", "start_ns", "duration_ns")
        seen = [SimpleNamespace(**dict(zip(fields, event, strict=True))) for event in events]
        return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=seen)])

    calls = (("measured_call", 0, 100), ("measured_call", 200, 50))
    one = (("warm", -20, 10), ("a", 10, 20), ("b", 20, 20), ("a", 210, 30))
    other = (("a", 5, 10), ("a", 85, 10), ("b", 120, 9))
    planes = [plane("/host:CPU", "main", *calls), plane("/device:GPU:0", "XLA Modules", ("program", 0, 100))]
    planes += [plane("/device:GPU:0", "Stream 1", *one), plane("/device:GPU:1", "Stream 2", *other)]
    trace = SimpleNamespace(planes=planes)
    found = _trace._device_times(trace, 2)
    assert [(time.busy, time.span) for time in found] == [
        pytest.approx((30e-9, 90e-9)),  # busy on the first, spread over the second
        pytest.approx((30e-9, 30e-9)),
    ]
    with pytest.raises(RuntimeError, match="the profiler saw 2 of 3 calls, 2 with device work"):
        _trace._device_times(trace, 3)


def test_slope_repeats_the_function_on_its_inputs() -> None:
    args = (jnp.arange(6.0).reshape(2, 3), jnp.array([True, False]), jnp.int32(3), jax.random.key(0))
    seen = []

    def fn(x: jax.Array, flag: jax.Array, n: jax.Array, key: jax.Array) -> jax.Array:
        jax.debug.callback(lambda *a: seen.append(a), x, flag, n, jax.random.key_data(key))
        return x * 2

    _measure._repeated(Case("fn", fn, args))(3)
    jax.effects_barrier()
    assert len(seen) == 3
    for turn in seen:
        for value, expected in zip(turn, (*args[:3], jax.random.key_data(args[3])), strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.slow(days=28, group="costly")
def test_forward_backward_gives_outputs_and_the_vjp_of_a_random_cotangent() -> None:
    x, w = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), jnp.linspace(0.0, 2.0, 20).reshape(4, 5)
    index = jnp.array([0, 2])
    case = Case("op", lambda p, i: {"y": jnp.sin(p["x"] @ p["w"])[i], "i": i}, ({"x": x, "w": w}, index))
    run = forward_backward(case, jax.random.key(3))
    (y,), (same_index,), grads = run.fn(*run.args)

    (cotangent,) = run.args[2]
    assert cotangent.shape == (2, 5)
    assert len(np.unique(np.asarray(cotangent))) == 10
    weight = jnp.zeros((3, 5)).at[index].set(cotangent) * jnp.cos(x @ w)
    limits = tol(jnp.float32, n=5)
    np.testing.assert_allclose(y, jnp.sin(x @ w)[index], **limits)
    np.testing.assert_array_equal(same_index, index)
    expected = {"w": x.T @ weight, "x": weight @ w.T}  # leaves of a dict come sorted by key
    for got, want in zip(grads[0] if isinstance(grads, tuple) else grads, expected.values(), strict=True):
        np.testing.assert_allclose(got, want, **limits)


def test_ceilings_and_floor(quick_timing: None) -> None:
    limits = _measure.measure_ceilings(matmul_size=128, copy_bytes=2**20)
    assert limits.flops_per_second == pytest.approx(2 * 128**3 / TRIAL_S)
    assert limits.bytes_per_second == pytest.approx(2 * 2**20 / TRIAL_S)
    by_flops = limits.floor(flops=3 * limits.flops_per_second, bytes_moved=0)
    by_bytes = limits.floor(flops=0, bytes_moved=5 * limits.bytes_per_second)
    assert by_flops == pytest.approx(3)
    assert by_bytes == pytest.approx(5)
    both = limits.floor(flops=3 * limits.flops_per_second, bytes_moved=5 * limits.bytes_per_second)
    assert both == pytest.approx(5)


def test_json_says_what_was_measured_where_and_with_what(clock: Clock) -> None:
    result = measure(clock.sleep, 0.0001, method="host", warmup=0, name="nap")
    read = json.loads(result.to_json())
    assert read["name"] == "nap"
    assert read["method"] == "host"
    assert read["seconds"] == list(result.seconds)
    assert read["summary"]["median"] == result.summary.median
    assert read["machine"]["jax"] == jax.__version__
    assert read["machine"]["device"] == jax.devices()[0].device_kind
    assert "commit" in read["machine"]


def test_union_of_overlapping_and_nested_intervals() -> None:
    assert union_length([(5.0, 7.0), (0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (10.0, 11.0)]) == 8.0
    assert union_length([]) == 0.0


def test_bad_requests_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="take at least 20"):
        measure(lambda: None, method="host", trials=5)
    with pytest.raises(ValueError, match="needs an array argument"):
        measure(lambda: jnp.ones(3), method="slope")


def test_slopes_lost_in_noise_are_taken_again_over_more_turns(monkeypatch) -> None:
    """A bandwidth from a negative time made a floor of zero seconds."""
    asked: list[float] = []

    def timer(run, warmup: int, least: float):
        asked.append(least)
        return lambda: least - 0.02

    monkeypatch.setattr(_measure, "_slope_timer", timer)
    x = jnp.ones(3)
    result = compare(Case("first", jnp.sin, (x,)), Case("second", jnp.cos, (x,)), method="slope")
    assert result.first.seconds == result.second.seconds == (0.05 - 0.02,) * 20
    assert asked == [0.01, 0.01, 0.05, 0.05]


def test_slopes_that_stay_lost_in_noise_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(_measure, "_slope_timer", lambda run, warmup, least: lambda: -1.0)
    with pytest.raises(RuntimeError, match=r"\['busy'\].* 0\.25 s: the machine is too busy"):
        measure(jnp.sin, jnp.ones(3), name="busy", method="slope")


@pytest.mark.gpu
def test_profiler_and_slope_agree_on_a_gpu() -> None:
    x = jax.random.normal(jax.random.key(0), (4096, 4096), jnp.bfloat16)
    by_profiler = measure(lambda x: x @ x, x, method="profiler").summary.median
    by_slope = measure(lambda x: x @ x, x, method="slope").summary.median
    assert by_profiler < by_slope < 1.5 * by_profiler  # the loop itself costs some 20 us a turn


def test_cases_are_compiled_ahead_where_the_profiler_times_them(monkeypatch):
    case = Case("double", lambda x: 2 * x, (jnp.arange(3.0),))
    assert compiled([case]) == [case]
    monkeypatch.setattr(_measure, "default_method", lambda: "profiler")
    (ahead,) = compiled([case])
    assert isinstance(ahead.fn, jax.stages.Compiled)
    assert _measure.as_program(ahead.fn) is ahead.fn
    np.testing.assert_array_equal(ahead.fn(*ahead.args), [0.0, 2.0, 4.0])


def test_a_program_is_compiled_while_the_next_is_lowered(monkeypatch):
    monkeypatch.setattr(_measure, "default_method", lambda: "profiler")
    compiling, compile = Event(), jax.stages.Lowered.compile

    def announced(lowered: Any) -> Any:
        compiling.set()
        return compile(lowered)

    def waiting(x: Any) -> Any:
        assert compiling.wait(10)
        return x + 1

    monkeypatch.setattr(jax.stages.Lowered, "compile", announced)
    x = jnp.arange(3.0)
    _, second = compiled([Case("double", lambda x: 2 * x, (x,)), Case("waiting", waiting, (x,))])
    np.testing.assert_array_equal(second.fn(x), [1.0, 2.0, 3.0])
