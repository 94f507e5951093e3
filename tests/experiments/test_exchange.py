"""The benchmark of exchanges on virtual devices: its figures, what it checks, what it refuses."""

import json
from pathlib import Path

import jax
import pytest

from experiments.benchmark import exchange


def test_it_leaves_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "exchange.json"
    found = exchange.benchmark(str(out), settings=("default", "peer"), mib=(0.01,))["exchanges"]
    assert json.loads(out.read_text(encoding="utf-8"))["exchanges"] == found
    assert [x["setting"] for x in found] == ["default", "peer"]
    for entry in found:
        taken = entry["seconds"]
        assert taken["least"] <= taken["median"] <= taken["most"]
        assert entry["gib_per_second"] == pytest.approx(0.01 / 1024 / taken["median"])


def test_a_message_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)
    with pytest.raises(RuntimeError, match=r"0\.01 MiB did not arrive as they were sent, with no option"):
        exchange.exchange(0.01)


def test_a_setting_that_the_compiler_does_not_know_says_so() -> None:
    assert "xla_gpu_unheard_of" in exchange._attempt(0.01, {"xla_gpu_unheard_of": True})["failed"]


def test_one_device_has_nobody_to_send_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs at least 2 devices, there is 1"):
        exchange.benchmark("nowhere.json")
