"""Memory against context: exact states at full size, exponents that a constant does not hide, a step's parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.benchmark.figures.exponents import exponent
from experiments.benchmark.memory import memory_context as benchmark
from experiments.benchmark.memory.memory_context import (
    LENGTHS,
    check_smaller,
    memory_context,
    model,
    of_steps,
    step_bytes,
    target,
)

SHAPE = {"dim": 16, "num_layers": 2, "window": 16, "chunk_size": 16}
FAR = LENGTHS[::3]
ALL = ("attention", "window", "mag", "mal", "mac", "slots")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The benchmark's own sizes, without training: shapes take no memory."""
    out = tmp_path_factory.mktemp("record") / "memory_context.json"
    memory_context(str(out), models=ALL, lengths=FAR, train_lengths=())
    return json.loads(out.read_text(encoding="utf-8"))


def test_states_are_counted_exactly(full: dict[str, Any]) -> None:
    found = {name: of["state"]["bytes"] for name, of in full["models"].items()}
    caches = [2 * 2 * 1024 * 4 * length for length in FAR]  # keys and values, bf16, D, layers
    rest = np.subtract(found["attention"], caches)
    assert (rest >= 0).all()
    assert (rest < 0.002 * np.array(caches)).all()
    heads, width = 16, 64
    memories = (
        2 * 4 * 4 * heads * 2 * width * 4 * width
    )  # M and S, fp32, layers, two matrices [K, 4 K] a head
    assert memories < found["mag"][0] - found["window"][0] < 1.6 * memories


def test_states_are_constant_and_far_smaller_than_the_cache(full: dict[str, Any]) -> None:
    for name in ALL[1:]:
        state, ratio = full["models"][name]["state"], full["smaller"][name][-1]
        assert state["exponent"] == {"value": 0, "low": 0, "high": 0, "from": LENGTHS[0]}
        assert ratio == full["models"]["attention"]["state"]["bytes"][-1] / state["bytes"][-1] >= 128
    grown = full["models"]["attention"]["state"]["exponent"]
    assert grown["low"] <= grown["value"] <= grown["high"]
    assert grown["value"] == pytest.approx(1, abs=1e-5)


def test_a_state_that_is_too_large_or_grows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"mag is to be 128 times smaller .* 1,048,576 bytes, and is \d+\.\d times"
    ):
        memory_context(str(tmp_path / "no"), models=("attention", "mag"), window=16_384, train_lengths=())
    assert not (tmp_path / "no").exists()
    grows = {"models": {"slots": {"state": {"bytes": [1, 2]}}}, "smaller": {"slots": [9, 9]}}
    with pytest.raises(RuntimeError, match=r"of slots is to be of constant size, got \[1, 2\]"):
        check_smaller(grows | {"lengths": [8, 16], "window": 4})


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_what_no_length_changes_does_not_lower_the_exponent(
    power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "step_bytes", lambda _, n, __: {"total": 10**9 + 7 * int(n**power)})
    lengths = (1024, 4096, 16_384, 65_536)
    found = of_steps(model("window", **SHAPE), lengths, None)
    assert found["exponent_of_added"]["value"] == pytest.approx(power, abs=1e-9)
    totals = exponent(lengths, found["bytes"], first=1)
    assert totals is not None
    assert totals["value"] < power - 0.2
    assert found["bytes_per_token"] == pytest.approx(7 if power == 1 else 7 * (65_536 + 16_384))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"models": ("mag",)}, r"--models must name attention, .* got \('mag',\)"),
        ({"lengths": (64, 32)}, r"--lengths must rise, two or more, got \(64, 32\)"),
        (
            {"train_lengths": (16, 32, 48)},
            r"the same multiple of the one before, two or more, got \(16, 32, 48\)",
        ),
        ({"train_lengths": (16,)}, "two or more"),
    ],
)
def test_lengths_and_models_are_checked(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        memory_context(str(tmp_path / "no"), **changes)


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("name", ALL)
def test_a_step_is_compiled_for_this_device(name: Any) -> None:
    short, long = (step_bytes(model(name, **SHAPE), length, target(None)) for length in (32, 256))
    assert all(part["total"] == sum(part.values()) - part["total"] for part in (short, long))
    assert 0 < short["temporaries"] < long["temporaries"]
    assert 0 < long["arguments"] - short["arguments"] < 224 * 4 * 8
