"""The benchmark of long prompts, tiny, on virtual devices: its figures, its gate, what it refuses."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmark.models import generation
from jaxblt import patching
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, StackConfig
from tests.mixer_table import table

LENGTH, BLOCK = 150, 64
TINY: Any = {"lengths": (LENGTH,), "new_bytes": 6, "pattern": "A"}


@dataclass(frozen=True)
class SmallBlocks(patching.PatcherConfig):
    """A prompt ends in the third of them."""

    block_size: int = BLOCK


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = AttentionConfig(dim=8, num_heads=2)
    local = StackConfig(
        dim=8, num_layers=1, pattern="W", mlp_dim=0, mixers=table(attention=attention, window=8), scan=False
    )

    def model(pattern: str, remat: str) -> BLTConfig:
        assert (pattern, remat) == ("A", "none")
        return BLTConfig(local, replace(local, pattern=pattern), local, hash=None, bridge_heads=2)

    monkeypatch.setattr(generation, "split_model", model)
    monkeypatch.setattr(patching, "PatcherConfig", SmallBlocks)


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize("devices", [1, 2])
def test_it_leaves_its_figures(devices: int, tmp_path: Path) -> None:
    out = tmp_path / "generation.json"
    (found,) = generation.generation(str(out), devices=devices, **TINY)["prompts"]
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["devices_of_sequence"], written["prompts"]) == (devices, [found])
    assert 0 < found["difference_of_logits"] < generation.WITHIN
    assert found["bytes_read_per_second"] == LENGTH / found["read_seconds"]["median"]
    assert found["seconds_a_byte_written"] == found["write_seconds"]["median"] / 6


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_logits_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generation, "WITHIN", 0.0)
    with pytest.raises(
        RuntimeError, match=rf"behind a prompt of {LENGTH} bytes logits differ by .*: 0\.0 is allowed"
    ):
        generation.generation(str(tmp_path / "generation.json"), **TINY)


@pytest.mark.parametrize("changes", [{"new_bytes": 0}, {"lengths": (6,)}, {"lengths": ()}])
def test_prompts_that_are_too_short_are_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match="prompts must be longer than the"):
        generation.generation("nowhere.json", **TINY | changes)


@pytest.mark.parametrize("devices", [0, 9])
def test_devices_that_are_not_there_are_an_error(devices: int) -> None:
    with pytest.raises(ValueError, match=rf"devices must lie in 1\.\.8.*got {devices}"):
        generation.generation("nowhere.json", devices=devices, **TINY)
