"""The reference against sums written out, in f64."""

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.attention import EMPTY_LSE, attention
from pallas_kernels.attention import reference as dense
from tests.pallas_kernels.attention.cases import CALLS, Call
from tests.tolerances import assert_close

SMALL = [
    call for call in CALLS if call.queries * (call.keys or call.queries) <= 4500 and call.dtype == np.float32
]


def _sees(call: Call, a: dict[str, np.ndarray], b: int, t: int, s: int) -> tuple[bool, int]:
    distance = t - s
    if call.positions:
        distance = int(a["q_positions"][b, t]) - int(a["kv_positions"][b, s])
    sees = True
    if call.causal:
        sees = sees and distance >= 0
    if call.window is not None:
        sees = sees and (distance if call.causal else abs(distance)) < call.window
    if call.segments:
        sees = sees and a["q_segment_ids"][b, t] == a["kv_segment_ids"][b, s] > 0
    if call.lengths:
        sees = sees and s < a["lengths"][b]
        if a["q"].shape[1] == a["k"].shape[1]:
            sees = sees and t < a["lengths"][b]
    return bool(sees), distance


def written_out(call: Call, a: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp, one query of one head at a time."""
    (batch, queries, heads, size), (_, keys, groups, _) = a["q"].shape, a["k"].shape
    o, lse = np.zeros(a["q"].shape), np.full((batch, heads, queries), EMPTY_LSE)
    scale = size**-0.5 if call.scale is None else call.scale
    for b, t in np.ndindex(batch, queries):
        marks = [(s, *_sees(call, a, b, t, s)) for s in range(keys)]
        seen = [(s, distance) for s, sees, distance in marks if sees]
        for h in range(heads if seen else 0):
            g = h // (heads // groups)
            slope = a["alibi_slopes"][h] if call.alibi else 0.0
            scores = np.array([scale * a["q"][b, t, h] @ a["k"][b, s, g] - slope * d for s, d in seen])
            weights = np.exp(scores)
            lse[b, h, t] = np.log(weights.sum())
            o[b, t, h] = weights @ a["v"][b, [s for s, _ in seen], g] / weights.sum()
    return o, lse


@pytest.mark.parametrize("call", SMALL, ids=str)
def test_reference_is_the_written_out_sum(call):
    arrays = call.arrays()
    exact = {
        n: np.asarray(x).astype(np.float64 if x.dtype == np.float32 else np.int64) for n, x in arrays.items()
    }
    o, lse = written_out(call, exact)
    keys = call.keys or call.queries
    options: Any = {"scale": call.scale}

    @jax.jit
    def run(given: Any) -> Any:
        return dense.attention_with_lse(**given, **options), attention(
            **given, **options, implementation="reference"
        )

    (got_o, got_lse), again = run(call.arguments(arrays))
    assert_close(got_o, o, n=keys)
    empty = lse == EMPTY_LSE
    assert np.array_equal(np.asarray(got_lse) == np.float32(EMPTY_LSE), empty)
    assert_close(np.where(empty, np.float32(0), np.asarray(got_lse)), np.where(empty, 0, lse), n=keys)
    assert_close(again, o, n=keys)
