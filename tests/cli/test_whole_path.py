"""Every command of the path from data to pictures, on one tiny recipe."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblt.cli.main import main
from jaxblt.profiling.history import keep

RECIPE = """
from jaxblt.data import DataConfig
from jaxblt.mixers import AttentionConfig, StateEngineConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import MeshConfig
from jaxblt.training import AdamWConfig, Recipe, TrainConfig


def tiny():
    mixers = {"engine": StateEngineConfig(8, 2, num_slots=3), "attention": AttentionConfig(8, 2)}
    stack = StackConfig(8, 2, ("engine", "attention"), mixers)
    data = DataConfig(paths=("text.txt",), seq_len=32, batch_size=2, packing="windows")
    adamw = AdamWConfig(warmup_steps=0)
    train = TrainConfig(steps=2, dtype="float32", eval_every=0, trackers=("jsonl",))
    return Recipe("tiny", ByteLMConfig(stack=stack), data, optimizer=adamw, train=train, mesh=MeshConfig(data=1))
"""


@pytest.mark.slow(days=28, group="long")
def test_commands_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: one)
    text = np.random.default_rng(0).choice(np.frombuffer(b"abcd ", np.uint8), 20_000).tobytes()
    Path("text.txt").write_bytes(text)
    Path("own.py").write_text(RECIPE)
    main(["train", "own.py:tiny", "--run-dir", "run"])
    main(["evaluate", "run", "--split", "validation", "--max-batches", "1"])
    main(["generate", "run", "--prompts", "ab", "--max-new-bytes", "4"])
    main(["export", "run", "--out", "run.safetensors"])
    main(["import", "run.safetensors", "--out", "again"])
    capsysbinary.readouterr()
    main(["card", "again"])
    assert b"ByteLMConfig" in capsysbinary.readouterr().out
    for show in ("routing", "attention"):
        main(["memory", "run", "text.txt", "--length", "20", "--show", show, "--out", show])
        assert json.loads(Path(f"{show}.json").read_text())["layers"]
    main(["benchmark", "own.py:tiny", "--compare", "none", "full", "--out", "times.json"])
    plain, full = json.loads(Path("times.json").read_text())["steps"]
    assert plain["seconds"]["trials"] == full["seconds"]["trials"] == 20
    assert full["time_ratio"] > 0
    assert full["memory_ratio"] > 0
    assert keep("times.json", "kept").parent.name == "step_tiny"
    assert b"x the first's time" in capsysbinary.readouterr().out
