"""The benchmark of exchanges on virtual devices: its figures, what it checks, what it refuses."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.benchmark import exchange


def test_it_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked, plain = tmp_path / "exchange.json", [], exchange.exchange
    monkeypatch.setattr(
        exchange, "exchange", lambda mib, options: asked.append(options) or plain(mib, options)
    )
    found = exchange.benchmark(str(out), settings=("default", "peer"), mib=(0.01,))["exchanges"]
    assert asked == [{}, {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["devices_in_ring"], written["exchanges"]) == (8, found)
    assert [x["setting"] for x in found] == ["default", "peer"]
    for entry in found:
        taken = entry["seconds"]
        assert taken["least"] <= taken["median"] <= taken["most"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": ()}, "at least one setting and one size"),
        ({"mib": ()}, "at least one setting and one size"),
        ({"mib": (0.0,)}, r"at least 3\.8e-06 MiB, got 0"),
        ({"mib": (-1.0,)}, r"at least 3\.8e-06 MiB, got -1"),
    ],
)
def test_nothing_to_send_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchange.benchmark("nowhere.json", **changes)


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
