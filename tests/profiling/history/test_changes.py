"""Planted slowdowns of a simulated clock are found, speed-ups and noise are not; thresholds follow the noise."""

import numpy as np
import pytest
from scipy import stats

from jaxblt.profiling.history import find_changes, threshold_of
from jaxblt.profiling.history.changes import ALPHA, FLOORS
from tests.profiling.history.simulated import MACHINE, draw_record

TIMES = {"forward": 1e-3, "backward": 2e-3}
DRAWS = 200


def share_slower(factor: float, *, noise: float, kept: int = 1, between: float = 0.0, seed: int = 0) -> float:
    """Return how often a time that grew by `factor` makes the gate fail."""
    draw = np.random.default_rng(seed)
    slowed = {name: value * factor if name == "forward" else value for name, value in TIMES.items()}
    failed = 0
    for _ in range(DRAWS):
        old = [draw_record(draw, TIMES, noise=noise, between=between) for _ in range(kept)]
        failed += bool(find_changes(old, draw_record(draw, slowed, noise=noise, between=between)).slower)
    return failed / DRAWS


@pytest.mark.parametrize("noise", [0.005, 0.03, 0.2])
def test_no_change_and_speed_ups_are_not_flagged(noise: float) -> None:
    """The bound allows for three standard errors of a share of so many draws."""
    assert share_slower(1.0, noise=noise) <= ALPHA + 3 * (ALPHA / DRAWS) ** 0.5
    assert share_slower(0.8, noise=noise) <= ALPHA + 3 * (ALPHA / DRAWS) ** 0.5


def test_power_at_5_and_10_percent() -> None:
    power = {factor: share_slower(factor, noise=0.02) for factor in (1.01, 1.05, 1.1)}
    assert power[1.01] < 0.1  # below the threshold
    assert power[1.05] >= 0.95
    assert power[1.1] == 1.0
    assert share_slower(1.05, noise=0.1) < 0.5 < share_slower(1.2, noise=0.1)


@pytest.mark.slow(days=28, group="costly", turn="profiling/history/test_changes")
def test_runs_that_vary_among_each_other_need_kept_runs() -> None:
    """Within a run 0.5 %, between runs 4 %: one old run promises what it cannot hold, eight know the noise."""
    assert share_slower(1.0, noise=0.005, between=0.04) > 0.2
    assert share_slower(1.0, noise=0.005, between=0.04, kept=8) <= ALPHA
    assert share_slower(1.25, noise=0.005, between=0.04, kept=8) > 0.9


def test_kept_runs_judge_by_students_prediction_of_one_more() -> None:
    """Three runs have two degrees of freedom, whatever the new one adds within itself."""
    draw = np.random.default_rng(0)
    *old, new = (draw_record(draw, {"a": seconds}, noise=1e-6) for seconds in (0.98, 1.0, 1.02, 1.1))
    (change,) = find_changes(old, new).found
    expected = stats.t.sf(0.1 / (0.02 * (1 + 1 / 3) ** 0.5), 2)
    assert change.p == pytest.approx(expected, rel=1e-2)


def test_a_known_variation_gives_a_known_threshold() -> None:
    runs = [0.98, 1.0, 1.02]  # their standard deviation is 0.02
    assert threshold_of(runs, "gpu") == pytest.approx(0.06)
    assert threshold_of(runs, "cpu") == FLOORS["cpu"] > FLOORS["gpu"]
    assert threshold_of([0.9, 1.0, 1.1], "cpu") == pytest.approx(0.3)
    assert threshold_of(runs[:2], "gpu") == threshold_of([1.0] * 9, "gpu") == FLOORS["gpu"]


def test_a_change_says_what_it_is_of() -> None:
    draw = np.random.default_rng(0)
    old = draw_record(draw, TIMES | {"gone": 1.0})
    new = draw_record(draw, {"forward": 1.2e-3, "backward": 1e-3, "more": 1.0})
    changes = find_changes([old], new)
    slow, fast = changes.found
    assert [slow.name, fast.name] == ["times/forward", "times/backward"]
    assert [slow.verdict, fast.verdict] == ["slower", "faster"]
    assert changes.slower == [slow]
    assert slow.ratio == pytest.approx(1.2, abs=0.02)
    assert slow.p < 1e-6
    assert (changes.only_old, changes.only_new) == (["times/gone"], ["times/more"])


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (
            {"devices": MACHINE | {"kind": "NVIDIA A100"}},
            "machine is 1 x NVIDIA H200, the new one's 1 x NVIDIA A100",
        ),
        ({"benchmark": "ring"}, "benchmark is stack, the new one's ring"),
    ],
)
def test_other_machines_and_benchmarks_are_refused(origin: dict[str, object], said: str) -> None:
    draw = np.random.default_rng(0)
    with pytest.raises(ValueError, match=said):
        find_changes([draw_record(draw, TIMES)], draw_record(draw, TIMES, **origin))


def test_times_by_two_methods_are_refused() -> None:
    draw = np.random.default_rng(0)
    old, new = draw_record(draw, TIMES), draw_record(draw, TIMES)
    new["times"]["forward"]["method"] = "host"
    with pytest.raises(ValueError, match="timed by None and now by host"):
        find_changes([old], new)
