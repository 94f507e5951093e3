"""The benchmark of exchanges on virtual devices: its figures, what it checks, what it refuses."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from experiments.benchmark.splitting import exchange


def test_it_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked, plain = tmp_path / "exchange.json", [], exchange.prepare
    monkeypatch.setattr(exchange, "prepare", lambda mib, name: asked.append(name) or plain(mib, name))
    found = exchange.exchange(str(out), settings=("default", "peer"), mib=(0.01,))["exchanges"]
    assert asked == ["default", "peer"]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["devices_in_ring"], written["exchanges"]) == (8, found)
    assert [x["setting"] for x in found] == ["default", "peer"]
    for entry in found:
        taken = entry["seconds"]
        assert taken["low"] <= taken["median"] <= taken["high"]
        assert (taken["trials"], taken["method"]) == (20, "calls")


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
        exchange.exchange("nowhere.json", **changes)


def test_a_message_that_does_not_arrive_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, *_: x)
    with pytest.raises(
        RuntimeError, match=r"0\.01 MiB did not arrive as they were sent, by setting 'default'"
    ):
        exchange.send_messages(0.01)


def test_a_setting_that_the_compiler_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exchange.SETTINGS, "peer", {"xla_gpu_unheard_of": True})
    ((found),) = exchange.send_messages(0.01, ("peer",))
    assert "xla_gpu_unheard_of" in found["failed"]


def test_one_device_has_nobody_to_send_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs at least 2 devices, there is 1"):
        exchange.exchange("nowhere.json")
