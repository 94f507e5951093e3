"""The benchmark of a split sequence leaves figures, tiny, on virtual devices."""

import json
from typing import get_args

import numpy as np
import pytest

from experiments.benchmark.splitting import (
    sequence_parallel,
    split_books,
    split_layers,
)
from experiments.benchmark.splitting.kinds import Kind
from jaxblt.mixers import GatedRecurrenceConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, StackConfig
from tests.mixer_table import table


def tiny(pattern: str) -> StackConfig:
    hyena = HyenaConfig(dim=8, filter=ModalFilter(modes=2), packed=False)
    mixers = table(hyena=hyena, R=GatedRecurrenceConfig(dim=8))
    return StackConfig(dim=8, num_layers=1, pattern=pattern, mlp_dim=0, mixers=mixers, scan=False)


@pytest.mark.slow(days=28, group="scripts leave their figures")
@pytest.mark.parametrize(
    "shape", [("modal", 2048, 8), ("gated_delta_net", 4096, 8)], ids=lambda shape: shape[0]
)
def test_a_layer_on_one_device_and_on_two(tmp_path, shape):
    out = tmp_path / "found.json"
    found = sequence_parallel.sequence_parallel(
        str(out), devices=2, layers=(shape,), step_bytes=(), forward_bytes=()
    )
    (entry,) = found["layers"]
    assert (entry["filter"], entry["tokens"], entry["dim"], entry["devices"]) == (*shape, 2)
    times = [entry[side]["seconds"]["median"] for side in ("one", "all")]
    assert entry["speed_up"] == pytest.approx(times[0] / times[1])
    assert 0 < entry["all"]["planned_bytes"] < entry["one"]["planned_bytes"]
    written = json.loads(out.read_text())
    assert written["layers"] == found["layers"]
    assert written["versions"]["jax"]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_layer_has_a_mixer_of_its_width(kind):
    mixer = split_layers.mixer(kind, 4096, 256)
    assert (mixer.dim, mixer.causal) == (256, True)
    shape = getattr(mixer, "shape", None)
    assert shape is None or shape.values == (64 if kind == "mamba2" else 128)


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_step_checks_its_loss_against_one_device():
    config = BLTConfig(encoder=tiny("R"), latent=tiny("H"), decoder=tiny("R"), hash=None, bridge_heads=2)
    found = split_books.compared(config, split_books.step(config, 128, devices=2, trials=20), trials=20)
    assert found["check"]["bytes"] == 64
    assert found["check"]["relative"] < 0.01
    assert found["one_on_its_share"]["first_loss"] > 1
    assert found["bytes_per_second"] == 128 / found["all"]["seconds"]["median"]
    times = [found[side]["seconds"]["median"] for side in ("one_on_its_share", "all")]
    assert found["efficiency"] == pytest.approx(times[0] / times[1])


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_the_loss_without_gradients_is_that_of_a_step():
    config = BLTConfig(encoder=tiny("R"), latent=tiny("H"), decoder=tiny("R"), hash=None, bridge_heads=2)
    found = split_books.forward(config, 128, devices=2, trials=20, dtype=np.float32)
    step = split_books._step_on(
        config, split_books._patcher(32), split_layers.meshes(2)[1], 128, np.float32, trials=None
    )
    assert found["all"]["loss"] == pytest.approx(step["first_loss"], rel=1e-5)
    assert found["bytes_per_second"] == 128 / found["all"]["seconds"]["median"]


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_one_device_is_timed_and_compared_with_none(tmp_path, monkeypatch):
    config = BLTConfig(encoder=tiny("R"), latent=tiny("H"), decoder=tiny("R"), hash=None, bridge_heads=2)
    monkeypatch.setattr(sequence_parallel, "split_model", lambda *_: config)
    lengths = {"step_bytes": (64, 128), "forward_bytes": (128,)}
    found = sequence_parallel.sequence_parallel(str(tmp_path / "one.json"), devices=1, layers=(), **lengths)
    assert [set(x) for x in found["steps"]] == [{"bytes", "devices", "all", "bytes_per_second"}] * 2
    (read,) = found["forward"]
    assert read["all"]["loss"] == pytest.approx(found["steps"][1]["all"]["first_loss"], rel=1e-2)


def test_layers_are_not_timed_on_one_device():
    with pytest.raises(ValueError, match="layers are split over 2 devices or more, got devices=1"):
        sequence_parallel.sequence_parallel("nowhere.json", devices=1)


@pytest.mark.parametrize("devices", [0, 9])
def test_devices_that_are_not_there_are_an_error(devices):
    with pytest.raises(ValueError, match=rf"devices must lie in 1\.\.8.*got {devices}"):
        sequence_parallel.sequence_parallel("nowhere.json", devices=devices)


@pytest.mark.parametrize("name", ["step_bytes", "forward_bytes"])
@pytest.mark.parametrize("length", [0, 1_000_002])
def test_lengths_that_do_not_divide_are_an_error_before_anything_runs(name, length):
    lengths = {"step_bytes": (), "forward_bytes": ()} | {name: (length,)}
    with pytest.raises(ValueError, match=rf"{length} bytes on 2 devices.*multiples of 4"):
        sequence_parallel.sequence_parallel("nowhere.json", devices=2, **lengths)
