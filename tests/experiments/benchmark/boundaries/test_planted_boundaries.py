"""The benchmark of planted boundaries: its cases, and what it leaves of a short training."""

import json

import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.boundaries import planted_boundaries as planted_cases


def test_each_case_has_a_router_and_a_set():
    routers = {case: planted_cases.router_of(case) for case in planted_cases.SETS}
    assert {case for case, router in routers.items() if router.reads_entropies} == {
        "entropy",
        "hybrid_runs",
        "hybrid_regions",
        "hybrid_motifs",
    }
    assert all(
        planted_cases.SETS[mixed] == planted_cases.SETS[best] for mixed, best in planted_cases.BEST.items()
    )


def test_a_mixture_is_compared_by_seed():
    cases = {
        case: {"seeds": [{"f1": f1} for f1 in each]}
        for case, each in {"content": (0.9, 1.0), "hybrid_runs": (0.8, 0.9), "entropy": (1.0, 1.0)}.items()
    }
    (found,) = planted_cases.behind_best(cases).items()
    assert found[0] == "hybrid_runs"
    assert found[1]["value"] == pytest.approx(-0.1)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_short_training_leaves_its_figures(tmp_path):
    out = tmp_path / "planted.json"
    words = ["planted_boundaries", str(tmp_path / "runs"), "--out", str(out), "--cases", "given_motif"]
    main([*words, "--settings.seeds", "1", "--settings.steps", "6", "--settings.rows", "2"])
    case = json.loads(out.read_text(encoding="utf-8"))["cases"]["given_motif"]
    assert case["f1_before"]["value"] > 0.95
    assert case["set"] == "motifs"
    assert len(case["seeds"]) == 1
