"""The blockwise form: the property suite, the log-sum-exp and its gradient, cost."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import EMPTY_LSE, attention, attention_with_lse, blocks, masks
from pallas_kernels.attention import reference as dense
from pallas_kernels.attention.masks import Interval
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.attention.cases import CALLS, Call
from tests.sampled import thinned
from tests.tolerances import assert_close, relative_error


def _call(name: str) -> Call:
    return next(call for call in CALLS if call.name == name)


SUITE = ["window_both_sides", "segments_window", "decode_7_alibi"]


@pytest.mark.slow(
    days=28, group="properties of kernels", every=("causal", "segments_window", "decode_7_alibi")
)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_values_and_gradients(call):
    op_suite.check_reference(call.case("xla"))


@pytest.mark.slow(days=28, group="properties of kernels", every="segments_window-poison")
@pytest.mark.parametrize("check", sorted(set(op_suite.CHECKS) - {"reference"}))
@pytest.mark.parametrize("name", SUITE)
def test_properties(name, check):
    op_suite.CHECKS[check](_call(name).case("xla"))


MATRIX = list(itertools.product(CALLS, sorted(set(op_suite.CHECKS) - {"reference"}), ("xla", "reference")))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(("call", "check", "implementation"), thinned(MATRIX, 28, tuple), ids=str)
def test_every_property(call, check, implementation):
    op_suite.CHECKS[check](call.case(implementation))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(
    ("name", "size"), [("causal", 16), ("segments", 88), ("cross", 7), ("decode_7_alibi", 12)]
)
def test_any_block_size(name, size, monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK", size)
    case = _call(name).case("xla")
    op_suite.check_reference(replace(case, run=lambda arrays: case.run(arrays)))


def _with_lse(call: Call, attend) -> op_suite.Run:
    def run(arrays):
        o, lse = attend(**call.arguments(arrays), scale=call.scale)
        return o.astype(jnp.float32), jnp.where(lse == EMPTY_LSE, 0.0, lse)

    return run


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("name", ["causal_odd_gqa", "segments_window", "decode_7_alibi"])
def test_log_sum_exp_and_its_gradient(name):
    call = _call(name)
    arrays, terms = call.arrays(), call.keys or call.queries
    run, reference = _with_lse(call, attention_with_lse), _with_lse(call, dense.attention_with_lse)
    op_suite.check_reference(
        op_suite.OpCase(name=name, run=run, reference=reference, arrays=arrays, terms=terms)
    )
    # Of the log-sum-exp alone, where a backward pass that drops its cotangent gives zero.
    (o, lse), _ = op_suite.value_and_grads(run, arrays)
    cotangents = (jnp.zeros_like(o), jnp.sin(jnp.arange(lse.size, dtype=jnp.float32)).reshape(lse.shape))
    _, grads = op_suite.value_and_grads(run, arrays, cotangents)
    _, expected = op_suite.value_and_grads(reference, arrays, cotangents)
    assert np.abs(expected["q"]).max() > 1e-2
    for n in ("q", "k"):
        assert_close(grads[n], expected[n], n=terms, what=n)
    assert not grads["v"].any()


@pytest.mark.slow(days=28, group="properties of kernels")
def test_halves_of_the_keys_merge_to_the_whole():
    """Two halves of the keys, merged by log-sum-exp: values and gradients of attention over all of them."""
    call = Call(name="ring", queries=96, heads=4, groups=2)
    arrays = call.arrays()
    positions = jnp.broadcast_to(jnp.arange(96, dtype=jnp.int32), (2, 96))

    def merged(a):
        halves = []
        for half in (slice(0, 48), slice(48, 96)):
            k, v, at = a["k"][:, half], a["v"][:, half], positions[:, half]
            halves.append(attention_with_lse(a["q"], k, v, masks.CAUSAL & masks.positions(positions, at)))
        lse = jnp.logaddexp(halves[0][1], halves[1][1])
        weights = [jnp.exp(half[1] - lse).swapaxes(1, 2)[..., None] for half in halves]
        return sum((o * w for (o, _), w in zip(halves, weights, strict=True)), start=jnp.zeros_like(a["q"]))

    case = op_suite.OpCase(
        name="ring", run=merged, reference=call.case("reference").reference, arrays=arrays, terms=96
    )
    op_suite.check_reference(case)


def test_large_scores_stay_finite():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(100 * rng.standard_normal((1, 40, 2, 8)), jnp.float32) for _ in range(3))
    out, grads = op_suite.value_and_grads(
        lambda a: attention(**a, mask=masks.CAUSAL, implementation="xla"), {"q": q, "k": k, "v": v}
    )
    assert all(np.isfinite(x).all() for x in (out, *grads.values()))
    # Scores are of the order of 1e4, so their rounding alone moves the weights by parts in a thousand.
    expected = jax.jit(partial(attention, mask=masks.CAUSAL, implementation="reference"))(q, k, v)
    assert relative_error(out, expected) < 1e-2


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_xla")
@pytest.mark.parametrize("window", [None, 256])
def test_memory_is_linear_in_length(window):
    """The compiled forward and backward pass holds no array of T x T scores."""

    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)

        def gradients(q, k, v):
            return jax.vjp(lambda *a: attention(*a, masks.band(True, window), implementation="xla"), q, k, v)[
                1
            ](q)

        return jax.jit(gradients).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 4 * short * 1.2
    assert long < 8192 * 8192


def test_a_window_visits_a_band():
    grid = blocks.choose_blocks(65536, 65536, interval=Interval(511, 0), by_index=True)
    visited = grid.count() * grid.block_q * grid.block_k
    assert visited <= 2 * 65536 * 512
    assert len(grid.pairs()) == grid.count()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 9, 100])
def test_pairs_are_those_that_can_meet(causal, window):
    grid = blocks.Blocks(30, 30, 4, 8, masks.band(causal, window).interval, True)
    index = np.arange(32)
    distance = index[:, None] - index[None]
    seen = np.ones_like(distance, bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= (distance if causal else np.abs(distance)) < window
    seen = np.pad(seen, ((0, 0), (0, 0))).reshape(8, 4, 4, 8).any((1, 3))
    assert grid.pairs().tolist() == np.argwhere(seen).tolist()


@pytest.mark.parametrize("interval", [Interval(after=-20), Interval(before=-20)])
def test_an_interval_that_leaves_rows_empty_lists_the_other_pairs(interval):
    index = np.arange(32)
    seen = interval.sees(index[:, None], index[None]).reshape(8, 4, 4, 8).any((1, 3))
    assert blocks.Blocks(30, 30, 4, 8, interval, True).pairs().tolist() == np.argwhere(seen).tolist()


def test_the_list_of_pairs_stays_short():
    grid = blocks.choose_blocks(1 << 20, 1 << 20, interval=Interval(after=0), by_index=True)
    assert grid.count() <= blocks.MOST_PAIRS
