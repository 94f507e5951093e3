"""Time by length: exponents, where curves cross, and the benchmark's figures."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.benchmark.figures import programs as timed_programs
from experiments.benchmark.figures.exponents import crossover, exponent
from experiments.benchmark.models import block_programs, scaling
from jaxblt import profiling
from jaxblt.mixers import GatedRecurrenceConfig, StateEngineConfig
from jaxblt.models import StackConfig
from jaxblt.models.mixer_table import STORED
from jaxblt.training.flops import PEAK_FLOPS

LENGTHS = (1024, 2048, 4096, 8192)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_exponent_of_a_power_is_found_past_a_constant(power: float) -> None:
    seconds = [3e-3 * n**power if n > 1024 else 1.0 for n in LENGTHS]
    found = exponent(LENGTHS, seconds, first=2048)
    assert found is not None
    assert found["low"] <= found["value"] <= found["high"]
    assert np.isclose(found["value"], power)
    assert found["high"] - found["low"] < 1e-6
    noisy = exponent(LENGTHS, [1.0, 2.2, 3.8, 8.1], first=1)
    assert noisy is not None
    assert noisy["low"] < 1 < noisy["high"]
    assert exponent(LENGTHS, seconds, first=4096) is None


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ((0.5, 0.5, 2.0, 4.0), 2048 * 2**0.5),
        ((2.0, 0.5, 0.5, 0.5), None),
        ((2.0, 3.0, 4.0, 5.0), 1024.0),
        ((2.0, 1.0, 4.0, 5.0), 2048.0),
    ],
)
def test_curves_cross_where_the_ratio_stays_above_one(
    ratios: tuple[float, ...], length: float | None
) -> None:
    found = crossover(LENGTHS, ratios)
    assert found == length or (found is not None and length is not None and np.isclose(found, length))


def test_attention_that_was_not_timed_is_crossed_nowhere() -> None:
    seconds = {p: {"median": 1.0, "low": 1.0, "high": 1.0} for p in block_programs.PASSES}
    found = scaling.crossing([{"tokens": 131_072, **seconds}], [])
    assert [end for ends in found.values() for end in ends.values()] == [None] * 6


def test_a_block_is_faster_from_where_attention_takes_longer() -> None:
    """Attention takes half the block's time, then the same, then twice; each is known to a tenth."""

    def timed(tokens: int, seconds: float) -> dict[str, Any]:
        ends = {"median": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds}
        return {"tokens": tokens, **dict.fromkeys(block_programs.PASSES, ends)}

    block = [timed(n, 2.0) for n in LENGTHS]
    found = scaling.crossing(block, [timed(n, s) for n, s in zip(LENGTHS, (1.0, 2.0, 4.0, 8.0), strict=True)])
    for ends in found.values():
        assert ends["value"] == pytest.approx(2048)
        assert 1024 < ends["low"] < 2048 < ends["high"] < 4096
    slow = scaling.crossing(block, [timed(n, 1.0) for n in LENGTHS])
    assert {end for ends in slow.values() for end in ends.values()} == {None}


def test_a_pass_that_does_not_fit_is_left_out() -> None:
    """The longest row has no time with gradients: exponent and crossing are of the others."""

    def timed(tokens: int, power: float) -> dict[str, Any]:
        seconds = 1e-9 * tokens**power
        ends = {"median": seconds, "low": seconds, "high": seconds}
        return {"tokens": tokens, "forward": ends, "forward+backward": ends if tokens < 2**17 else None}

    lengths = [2**n for n in range(14, 18)]
    found = scaling.growth([timed(n, 1.0) for n in lengths])
    assert [found[p]["value"] for p in block_programs.PASSES] == [pytest.approx(1)] * 2
    assert scaling.growth([timed(n, 1.0) for n in lengths[1:]])["forward+backward"] is None
    assert scaling.growth([timed(n // 32, 2.0) for n in lengths], 512)["forward"]["value"] == pytest.approx(2)
    crossed = scaling.crossing([timed(n, 1.0) for n in lengths], [timed(n, 1.1) for n in lengths])
    assert {end for ends in crossed.values() for end in ends.values()} == {float(lengths[0])}


def one_layer(name: str, dim: int) -> StackConfig:
    return StackConfig(dim=dim, num_layers=1, pattern=name, mixers={"R": GatedRecurrenceConfig(dim=dim)})


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/models/test_scaling")
def test_programs_that_run_out_of_memory_are_planned_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two mixers one fails with gradients; all other passes have times."""

    def compiled(cases: Any) -> Any:
        return [replace(one, fn=failing) if one.name == "R forward+backward" else one for one in cases]

    def failing(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 71 GiB")

    monkeypatch.setattr(block_programs, "block", one_layer)
    monkeypatch.setattr(profiling, "compiled", compiled)
    monkeypatch.setattr(timed_programs, "planned_bytes", lambda fn, *args: {"temporaries": 1})
    monkeypatch.setitem(PEAK_FLOPS, "cpu", 1e12)
    setting = block_programs.Setting(32, dtype="float32")
    drawn = {name: block_programs.draw_block(name, 32) for name in ("R", "A")}
    blocks = {name: block_programs.programs(name, params, 16, setting) for name, params in drawn.items()}
    found = scaling.at_length(block_programs.compile_blocks(blocks), drawn, 16, setting)
    assert found["R"]["forward+backward"] is None
    assert all(found["A"][p]["median"] > 0 for p in block_programs.PASSES)
    assert found["R"]["forward"]["median"] > 0
    assert found["R"]["forward"]["mfu"] is None  # the peak is of bf16
    assert found["R"]["planned_bytes"] == {"temporaries": 1}


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/models/test_scaling")
def test_programs_are_compiled_at_once_gradients_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program comes back to where it belongs."""
    asked: list[list[str]] = []

    def compiled(cases: Any) -> Any:
        asked.append([one.name for one in cases])
        return [replace(one, fn=partial(str, one.name)) for one in cases]

    monkeypatch.setattr(block_programs, "block", one_layer)
    monkeypatch.setattr(profiling, "compiled", compiled)
    drawn = {name: block_programs.draw_block(name, 32) for name in ("R", "A")}
    kinds = {"R": block_programs.Setting(32, dtype="float32"), "A": block_programs.Setting(32)}
    found = block_programs.compile_blocks(
        {name: block_programs.programs(name, drawn[name], 16, kinds[name]) for name in drawn}
    )
    assert asked == [["R forward+backward", "A forward+backward", "R", "A"]]
    for name, dtype in (("R", "float32"), ("A", "bfloat16")):
        cases = found[name].cases
        assert {kind: one.fn() for kind, one in cases.items()} == {
            "forward": name,
            "forward+backward": f"{name} forward+backward",
        }
        assert {one.args[1].dtype.name for one in cases.values()} == {dtype}


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def failing() -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no kernel")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no kernel"):
        scaling.fits(profiling.Case("one", failing))


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_scaling_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_programs, "block", one_layer)
    monkeypatch.setitem(PEAK_FLOPS, "cpu", 1e12)
    out = tmp_path / "scaling.json"
    shape: Any = {"mixers": ("R", "A"), "lengths": (16, 32), "dim": 32, "attention_up_to": 16}
    scaling.scaling(str(out), **shape)
    found = json.loads(out.read_text())
    assert (found["benchmark"], found["dtype"]) == ("scaling_on_cpu", "bfloat16")
    assert [at["tokens"] for at in found["blocks"]["R"]] == [16, 32]
    assert [at["tokens"] for at in found["blocks"]["A"]] == [16]
    for at in found["blocks"]["R"]:
        assert all(at[p]["median"] > 0 for p in block_programs.PASSES)
        assert at["forward"]["microseconds_per_token"] == pytest.approx(
            1e6 * at["forward"]["median"] / at["tokens"]
        )
        assert 0 < at["forward_flops"] < 2 * found["parameters"]["R"] * at["tokens"]
        for name, times in (("forward", 1), ("forward+backward", 3)):
            of = at[name]
            assert of["mfu"] * of["median"] == pytest.approx(times * at["forward_flops"] / 1e12)
        assert at["planned_bytes"]["temporaries"] > 0
    assert found["growth"]["R"]["forward"] is None  # no row is long
    assert set(found["crossover"]) == {"R"}


def test_an_unknown_number_of_states_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown mixer 'T16', choose among A, D, G, H, 2, R, P, U, L, N, T32"
    ):
        block_programs.block("T16", 128)


@pytest.mark.slow(days=28, group="costly")
def test_engines_have_edges_by_their_name() -> None:
    plain, edges = (block_programs.block(name, 256).mixers[name] for name in ("T64", "T64_edges"))
    assert isinstance(plain, StateEngineConfig)
    assert isinstance(edges, StateEngineConfig)
    assert (plain.interval_of_edges, edges.interval_of_edges) == (None, 64)
    assert (edges.slots, edges.cell, edges.state_attention, edges.state_routes) == (64, "gru", True, True)
    assert block_programs.parameters("T64_edges", 256) > block_programs.parameters("T64", 256)


@pytest.mark.parametrize("name", ["R", "P", "U", "L", "N"])
def test_mixers_that_step_token_by_token_are_timed_too(name: str) -> None:
    mixer = block_programs.block(name, 128).mixers[name]
    assert (type(mixer), mixer.dim) == (type(STORED[name]), 128)
    assert block_programs.parameters(name, 128) > 0


def test_lengths_must_rise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--lengths must rise, got \(32, 16\)"):
        scaling.scaling(str(tmp_path / "out.json"), lengths=(32, 16))
    with pytest.raises(ValueError, match=r"nothing to time: name mixers and lengths, got .* and \(\)"):
        scaling.scaling(str(tmp_path / "out.json"), lengths=())
    with pytest.raises(ValueError, match=r"--mixers must name different mixers, got \('D', 'D'\)"):
        scaling.scaling(str(tmp_path / "out.json"), mixers=("D", "D"), lengths=(16,))
    with pytest.raises(ValueError, match=r"--trials must be at least 20, got 5"):
        scaling.scaling(str(tmp_path / "out.json"), mixers=("D",), lengths=(16,), trials=5)


def test_a_width_is_refused_by_the_mixer_that_is_asked_for() -> None:
    assert block_programs.block("D", 100).mixers["D"].dim == 100
    with pytest.raises(ValueError, match="Mamba2Config: expand = 2 times dim = 100"):
        block_programs.block("2", 100)
