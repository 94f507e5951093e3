"""Measured memory beside plans: exponents, savings, and one process a model."""

from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.memory import measured_memory as module
from experiments.benchmark.memory.measured_memory import measured_memory, measured_steps, summary

LENGTHS = (512, 1024, 2048, 4096)


def steps(power: float) -> list[dict[str, int]]:
    """Return steps that are planned to grow by that power, and measured to take a tenth more."""
    sizes = [10**6 + int(n**power) for n in LENGTHS]
    return [
        {"tokens": n, "arguments": 7, "planned": size, "measured": size + size // 10}
        for n, size in zip(LENGTHS, sizes, strict=True)
    ]


def test_exponents_are_of_what_longer_rows_add() -> None:
    found = summary(steps(2.0))
    for kind in ("planned", "measured"):
        assert found["exponent_of_added"][kind]["value"] == pytest.approx(2, abs=1e-4)
    assert [step["measured_over_planned"] for step in found["steps"]] == [pytest.approx(1.1)] * 4
    shrinks = [{**step, "measured": 5} for step in steps(1.0)]
    assert summary(shrinks)["exponent_of_added"]["measured"] is None


def test_savings_are_those_of_the_longest_row(monkeypatch: pytest.MonkeyPatch) -> None:
    powers, written = {"attention": 2.0, "window": 1.0}, []
    monkeypatch.setattr(module, "measured_steps", lambda name, **_: steps(powers[name]))
    monkeypatch.setattr("experiments.benchmark.figures.saved.save", lambda *given: written.append(given))
    measured_memory("out.json", models=("window", "attention"))
    figures: dict[str, Any] = written[-1][2]
    assert "saved" not in written[0][2]
    assert figures["saved"] == {"window": pytest.approx(1 - (10**6 + 4096) / (10**6 + 4096**2), abs=1e-6)}
    with pytest.raises(ValueError, match="--models must name attention"):
        measured_memory("out.json", models=("window",))


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_process_grows_by_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of some MB; a process that fails says why."""
    monkeypatch.chdir(Path(__file__).parents[4])
    shape = {"dim": 64, "num_layers": 1, "window": 64, "chunk_size": 64}
    found = measured_steps(name="window", lengths=(4096,), shape=shape)[0]
    assert 0.5 < found["measured"] / found["planned"] < 1.5
    with pytest.raises(RuntimeError, match="steps of window failed"):
        measured_steps(name="window", lengths=(4096,), shape={})
