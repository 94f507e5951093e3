"""Codes from elsewhere than the router; the guard's breaker on an injected clock; alarms on planted faults."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Governor, RouterConfig
from jaxblt.adapters.code.fallback import count_replaced
from jaxblt.adapters.code.override import override_codes
from jaxblt.adapters.files.serving import (
    Guard,
    Limits,
    Telemetry,
    code_figures,
    guarded,
    mean_violations,
)
from jaxblt.answers.reading import make_reader
from jaxblt.inference import generate
from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import StackConfig
from jaxblt.models.stack import Stack, init_stack_state
from tests.parameters import drawn
from tests.tolerances import assert_close

ADAPTER = AdapterConfig(
    sites=("mlp/down",), rank=4, router=RouterConfig(level="chunk", chunk=3, reads=(ChunkMean(),), hidden=4)
)
SHORT = HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))
STACK = StackConfig(dim=8, num_layers=1, pattern="S", mixers={"S": SHORT}, mlp_dim=8, adapter=ADAPTER)
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 12, 8)).astype(np.float32))


@pytest.fixture(scope="module")
def params():
    """Drawn, U and the router's last kernel as well."""
    shapes = nn.meta.unbox(jax.eval_shape(Stack(STACK).init, jax.random.key(0), X))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape).astype(np.float32) * 0.5), shapes)


@pytest.fixture(scope="module")
def serve():
    """One program: the stack's output, and what is watched."""

    @jax.jit
    def call(params, x, fall_back, ids=None):
        figures = []
        with guarded(fall_back, 0.0, figures):
            y, _ = Stack(STACK).apply(params, x, segment_ids=ids)
        return y, figures

    return call


def without_router(params):
    return {"params": {name: below for name, below in params["params"].items() if name != "router"}}


@pytest.mark.slow(days=28, group="costly")
def test_an_overriding_code_meets_its_token_wherever_padding_lies(params):
    """In a call with a state tokens move to the front of their row, and so must codes."""
    ids = np.array([[1] * 12, [0, 0] + [2] * 10, [3, 0] * 6], np.int32)
    code = np.random.default_rng(2).standard_normal((3, 12, 4)).astype(np.float32)

    @jax.jit
    def run(params, x, code, ids, state=None):
        with override_codes(code):
            return Stack(STACK).apply(params, x, segment_ids=ids, state=state)[0]

    alone, state = without_router(params), init_stack_state(STACK, 3, capacity=12)
    packed = np.argsort(ids == 0, axis=1, stable=True)
    x, codes = (np.take_along_axis(np.asarray(a), packed[..., None], 1) for a in (X, code))
    expected = run(alone, x, codes, np.take_along_axis(ids, packed, 1))
    found = np.take_along_axis(np.asarray(run(alone, X, code, ids, state)), packed[..., None], 1)
    assert_close(found, expected, n=12 * 8)


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_serving")
def test_an_overriding_code_takes_the_routers_place(params, serve):
    @jax.jit
    def run(params, x, code):
        with override_codes(code):
            return Stack(STACK).apply(params, x)[0]

    off, alone = jnp.zeros((3, 12, 4)), without_router(params)
    base = run(alone, X, off)
    assert not np.allclose(run(alone, X, off + 1), base, atol=1e-3)
    np.testing.assert_allclose(serve(params, X, True)[0], base, rtol=1e-5, atol=1e-5)
    with override_codes(off):
        names = jax.eval_shape(Stack(STACK).init, jax.random.key(0), X)["params"]
    assert "router" not in names


@pytest.mark.slow(days=28, group="costly")
def test_a_guard_falls_back_in_the_same_program(params, serve):
    (on, figures), (off, base) = serve(params, X, False), serve(params, X, True)
    assert serve._cache_size() == 1
    assert not np.allclose(on, off, atol=1e-3)
    assert float(figures[0].active) == 1
    assert float(base[0].active) == 0
    assert float(figures[0].replaced) == 0


def test_a_row_whose_code_is_not_finite_falls_back(params, serve):
    broken = jax.tree.map(lambda x: x, params)
    broken["params"]["router"]["code"]["bias"] = broken["params"]["router"]["code"]["bias"].at[0].set(np.inf)
    base = serve(params, X, True)[0]
    y, figures = serve(broken, X, False)
    np.testing.assert_array_equal(y, base)
    assert float(figures[0].replaced) == 3
    telemetry = Telemetry()
    telemetry.record(0.1, figures)
    assert telemetry.alarms() == ["3 rows had a code that is not finite"]

    @jax.jit
    def continued(params, x, state):
        figures = []
        with guarded(jnp.zeros((), bool), 0.0, figures):
            y, state = Stack(STACK).apply(params, x, state=state)
        return y, state, figures

    y, state, figures = continued(broken, X, init_stack_state(STACK, 3, capacity=12))
    assert_close(y, base, n=12 * 8)
    assert float(figures[0].replaced) == 3
    np.testing.assert_array_equal(count_replaced(state), [9, 9, 9])


@pytest.mark.parametrize("context", [override_codes, guarded])
def test_programs_that_are_kept_are_not_made_inside(context):
    """They would have the context's codes in later calls outside; also where an iterator was made outside."""
    call = partial(generate, None, {}, [b"a"], max_new_bytes=1)
    pieces, options = call(stream=True), (jnp.zeros((), bool), 0.0, []) if context is guarded else (X,)
    words = rf"{context.__name__}\(...\), .* serve later calls too, .*: leave it, and"
    with context(*options):
        for asked in (call, partial(call, stream=True), partial(next, pieces)):
            with pytest.raises(
                ValueError, match=f"generate was called inside {words} choose .* adapters='base'"
            ):
                asked()
        with pytest.raises(ValueError, match=rf"answers was called inside {context.__name__}"):
            make_reader(None, window=None, batch_size=1)
    with pytest.raises(ValueError, match="needs at least one prompt"):
        generate(None, {}, [], max_new_bytes=1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_waits_and_tries_again():
    clock = Clock()
    guard = Guard(0.1, patience=2, cool_down=5.0, clock=clock)

    def call(seconds: float) -> bool:
        fell_back = guard.falls_back()
        clock.now += seconds
        guard.record(seconds)
        return fell_back

    assert [call(s) for s in (0.1, 0.3, 0.1, 0.3)] == [False] * 4
    assert guard.state == "closed"
    assert not call(0.21)
    assert guard.state == "open"
    assert call(0.1)
    clock.now += 5
    assert not call(0.3)
    assert (guard.state, guard.opened) == ("open", 2)
    assert call(9.0)
    assert not call(0.1)
    assert guard.state == "closed"
    with pytest.raises(ValueError, match=r"Guard\.baseline must be > 0, got 0\.0"):
        Guard(0.0)
    with pytest.raises(ValueError, match=r"Guard\.factor must be .*, got nan"):
        Guard(1.0, factor=float("nan"))


@pytest.mark.parametrize("seconds", [float("nan"), np.float32("nan"), -0.1])
def test_what_is_no_duration_is_refused(seconds):
    """By a breaker in any state, which keeps it."""
    clock = Clock()
    guard = Guard(0.1, patience=1, cool_down=5.0, clock=clock)
    for state in ("closed", "open", "half-open"):
        assert guard.state == state
        for record in (guard.record, lambda seconds: Telemetry().record(seconds, [])):
            with pytest.raises(
                ValueError, match=r"seconds must be 0 or more, got .*(nan|-0\.1).*: give what"
            ):
                record(seconds)
        assert guard.state == state
        guard.record(9.0)
        clock.now += 5 * (state == "open")
        guard.falls_back()
    assert guard.opened == 2


def test_a_call_that_fails_is_made_with_the_fallback_and_counted(params, serve, caplog):
    clock, broken = Clock(), True
    guard = Guard(0.1, cool_down=5.0, clock=clock)

    def call(falls_back):
        if broken and not falls_back:
            raise RuntimeError("planted")
        return serve(params, X, falls_back)[0]

    base = serve(params, X, True)[0]
    np.testing.assert_array_equal(guard.serve(call), base)
    assert (guard.state, guard.opened, guard.failed) == ("open", 1, 1)
    assert "planted" in caplog.text
    np.testing.assert_array_equal(guard.serve(call), base)
    clock.now += 5
    broken = False
    assert not np.allclose(guard.serve(call), base, atol=1e-3)
    assert (guard.state, guard.failed) == ("closed", 1)
    assert serve._cache_size() == 1

    def refuse(falls_back):
        raise ValueError("an empty prompt")

    with pytest.raises(ValueError, match="an empty prompt"):
        guard.serve(refuse)
    assert (guard.state, guard.opened, guard.failed) == ("closed", 1, 1)


def test_slow_calls_that_are_served_open_the_breaker():
    clock = Clock()
    guard = Guard(0.1, patience=1, clock=clock)

    def slow(falls_back):
        clock.now += 0.3
        return falls_back

    assert [guard.serve(slow) for _ in range(2)] == [False, True]


jitted_figures = jax.jit(code_figures)


def figures(code):
    return jitted_figures(code.astype(np.float32), np.zeros(len(code), bool))


EVEN = np.full((2, 6, 4), 0.25)
ONE = np.tile(np.eye(4)[0], (2, 6, 1))
TURNS = np.eye(4)[np.arange(6) % 2][None].repeat(2, 0)
LIMITS = Limits(least_entropy=0.5, most_rms=1.0, most_flips=0.5, most_p99=1.0)


def test_figures_of_codes():
    assert float(figures(EVEN).entropy) == pytest.approx(np.log(4), rel=1e-5)
    assert float(figures(ONE).entropy) == 0
    assert float(figures(ONE).rms) == pytest.approx(0.5)
    assert float(figures(ONE).active) == pytest.approx(0.25)
    assert float(figures(TURNS).flips) == 1


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_serving")
def test_padding_and_holes_raise_no_alarm(params, serve):
    """A healthy code in rows of which a tenth are tokens, a document each; and a call without any."""
    code = np.concatenate([np.tile(TURNS[:1, :2] + 0.2, (1, 10, 1))] * 2)
    ids, planted = np.zeros((2, 20), np.int32), code.copy()
    ids[:, 5], ids[1, 9:11] = 1, (1, 2)
    planted[ids == 0] = 0
    telemetry = Telemetry(limits=LIMITS)
    for padding in (ids, 0 * ids):
        found = jitted_figures(planted.astype(np.float32), np.zeros(2, bool), padding)
        telemetry.record(0.1, [found])
    alone = figures(code[:, :1])
    assert telemetry.alarms() == []
    assert telemetry.report()["entropy"] == pytest.approx(float(alone.entropy), rel=1e-5)
    assert telemetry.report()["active"] == 1
    ids = jnp.asarray(np.array([[1] * 12, [0, 0] + [2] * 10, [3, 0] * 6], np.int32))
    assert float(serve(params, X, False, ids)[1][0].tokens) == 28
    assert float(serve(params, X, False, ids)[1][0].active) == 1


@pytest.mark.parametrize(
    ("code", "seconds", "alarm"),
    [
        (EVEN, 0.1, []),
        (ONE, 0.1, ["entropy is 0, below 0.5"]),
        (8 * EVEN, 0.1, ["rms is 2, above 1"]),
        (EVEN, 3.0, ["p99 is 3, above 1"]),
        (TURNS + 0.2, 0.1, ["flips is 1, above 0.5"]),
    ],
)
def test_an_alarm_for_each_planted_fault(code, seconds, alarm):
    telemetry = Telemetry(window=4, limits=LIMITS)
    assert telemetry.alarms() == []
    for _ in range(5):
        telemetry.record(seconds, [figures(code)])
    assert telemetry.alarms() == alarm
    assert telemetry.report()["calls"] == 4


def test_a_slow_call_in_ten_is_above_a_limit_of_p95_and_one_in_fifty_is_not():
    for slow, alarm in ((5, ["p95 is 3, above 1"]), (1, [])):
        telemetry = Telemetry(limits=Limits(most_p95=1.0))
        for i in range(50):
            telemetry.record(3.0 if i < slow else 0.1, [])
        assert telemetry.alarms() == alarm


@pytest.mark.parametrize(
    ("hits", "violations", "alarm"),
    [
        (0.75, 0.05, []),
        (0.25, 0.05, ["hits is 0.25, below 0.5"]),
        (0.75, 0.5, ["violations is 0.5, above 0.1"]),
        (None, None, []),
    ],
)
def test_alarms_of_what_is_counted_elsewhere(hits, violations, alarm):
    telemetry = Telemetry(limits=Limits(least_hits=0.5, most_violations=0.1))
    telemetry.record(0.1, [figures(EVEN)])
    telemetry.record(0.1, [], hits=hits, violations=violations)
    assert telemetry.alarms() == alarm
    report = telemetry.report()
    assert (report.get("hits"), report.get("violations")) == (hits, violations)
    assert report["entropy"] == pytest.approx(np.log(4), rel=1e-5)


@pytest.mark.slow(days=28, group="costly")
def test_violations_are_those_of_governed_sites():
    """Of two sites in each of two layers, by one governor that bounds all and one that bounds none."""
    rates = []
    for tau in (0.1, 5.0):
        adapter = AdapterConfig(sites=("mlp/*",), rank=2, governor=Governor(start=tau, most=tau, least=tau))
        stack = dataclasses.replace(STACK, num_layers=2, adapter=adapter)
        own = drawn(Stack(stack), X, seed=0)["params"]
        own = jax.tree_util.tree_map_with_path(
            lambda path, x, tau=tau: (
                jnp.full_like(x, tau if tau < 1 else 1e6) if path[-1].key == "tau" else x
            ),
            own,
        )
        apply = jax.jit(lambda p, s=stack: Stack(s).apply({"params": p}, X, mutable=["metrics"])[1])
        rates.append(mean_violations(apply(own)))
    assert rates == [1, 0]
    assert mean_violations({}) is None


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_serving")
def test_what_is_watched_costs_under_a_twentieth_of_the_work():
    """By the operations of both programs as they are lowered: time would depend on the machine."""
    wide = dataclasses.replace(
        STACK, dim=256, num_layers=2, mlp_dim=1024, adapter=dataclasses.replace(ADAPTER, rank=8)
    )
    x = jax.ShapeDtypeStruct((4, 128, 256), jnp.float32)
    params = jax.eval_shape(Stack(wide).init, jax.random.key(0), x)
    params = nn.meta.unbox(params)

    def plain(params, x):
        return Stack(wide).apply(params, x)[0]

    def watched(params, x):
        figures = []
        with guarded(jnp.zeros((), bool), 0.0, figures):
            return Stack(wide).apply(params, x)[0], figures

    costs = [jax.jit(f).lower(params, x).cost_analysis() for f in (plain, watched)]
    for name in ("flops", "bytes accessed"):
        assert costs[0][name] < costs[1][name] < 1.05 * costs[0][name]


def test_what_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"hits must lie in 0..1, got 3: it is a share of tokens"):
        Telemetry().record(0.1, [], hits=3)


def test_no_window_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        Telemetry(window=0)
    assert dataclasses.asdict(Limits())["most_p99"] is None
