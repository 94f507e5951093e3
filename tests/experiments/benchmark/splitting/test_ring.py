"""The ring benchmark on 8 virtual devices: its f64 yardstick, its gate, its figures."""

import json
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from experiments.benchmark.splitting import ring
from experiments.benchmark.splitting.exchange import send_message
from experiments.benchmark.splitting.ring import hold
from pallas_kernels._dispatch import record_choices
from pallas_kernels.attention import attention, masks
from tests.tolerances import assert_close

TINY = {
    "lengths": (64,),
    "heads": 4,
    "groups": 2,
    "head_dim": 8,
    "dtype": "bfloat16",
    "exact_length": 64,
    "peers_up_to": 0,
    "message_mib": (0.01,),
}


def test_the_yardstick_is_causal_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((12, heads, 4)) for heads in (4, 2, 2, 4))

    def attend(*arrays: jax.Array) -> jax.Array:
        return attention(*(x[None] for x in arrays), mask=masks.CAUSAL, implementation="reference")[0]

    @jax.jit
    def passes(do: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        o, backward = jax.vjp(attend, *given)
        return o, *backward(do)

    expected = passes(*(x.astype(np.float32) for x in (do, q, k, v)))
    for got, want in zip(ring.exact_passes(q, k, v, do), expected, strict=True):
        assert_close(got.astype(np.float32), want, n=12)


@pytest.mark.parametrize(("error", "passes"), [(2.0, True), (2.1, False), (np.nan, False)])
def test_errors_are_held_to_others(error: float, passes: bool) -> None:
    with (
        nullcontext()
        if passes
        else pytest.raises(RuntimeError, match=r"new errs by .*'dq'.*, old by .*: 2\.0 times")
    ):
        hold("new", {"o": 1.0, "dq": error}, "old", {"o": 1.0, "dq": 1.0}, 2.0)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_it_leaves_its_figures(tmp_path) -> None:
    out = tmp_path / "ring.json"
    figures = ring.ring(out=str(out), **TINY)
    assert set(figures["errors_against_f64"]) == {"1", "2", "2 swapped", "4", "4 swapped", "8", "8 swapped"}
    assert figures["against_one_device"]["output_repeats_bit_for_bit"]
    (row,) = figures["scaling"]
    for name in ("forward", "forward_backward"):
        taken, alone = row[name]["ring"], row[name]["one_device"]
        assert taken["efficiency"] == pytest.approx(alone["median"] / (8 * taken["median"]))
        assert taken["efficiency_interval"][0] <= taken["efficiency"] <= taken["efficiency_interval"][1]
        apart, work = row[name]["independent"], 8 * (row["length_of_independent"] / 64) ** 2
        ratio = taken["efficiency_against_independent"] * taken["median"] / apart["median"]
        assert ratio == pytest.approx(1 / work)
    assert figures["exchange"][0]["gib_per_second"] > 0
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved["scaling"] == figures["scaling"]
    assert saved["versions"]["jax"]


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_the_gate_is_before_the_timing_and_of_the_kernel_asked_for(two_devices, monkeypatch) -> None:
    monkeypatch.setattr(ring, "WITHIN", 0.0)
    monkeypatch.setattr(ring, "measure_all", None)
    with (
        record_choices() as chosen,
        pytest.raises(RuntimeError, match=r"a ring of .* errs by .*, one device by"),
    ):
        ring.ring(**TINY, implementation="xla")
    assert any(
        line.startswith("partial_attention: xla") and line.endswith("(asked for)") for line in chosen
    ), chosen


@pytest.mark.parametrize("mib", [0.0, -1.0])
def test_nothing_to_send_is_refused(mib: float) -> None:
    with pytest.raises(ValueError, match=rf"at least 3\.8e-06 MiB, got {mib}"):
        send_message(mib)


def test_a_message_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)
    with pytest.raises(RuntimeError, match=r"0\.01 MiB did not arrive as they were sent"):
        send_message(0.01)
