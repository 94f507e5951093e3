"""Trackers: what each is given, which are chosen, and what is said where a package is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.log import hosted_trackers as hosted
from jaxblt.training.log.continuations import continuation_of
from jaxblt.training.log.hosted_trackers import check_trackers, open_trackers, run_id
from jaxblt.training.log.trackers import Tracker, grouped, hyperparameters_of, read_metrics
from jaxblt.training.loop import fit
from tests.training.log.test_runlog import events, png
from tests.training.tiny import Letters, tiny_recipe


class Fake:
    """Both packages in one: notes what it is told, and takes a picture only while its file is there."""

    def __init__(self) -> None:
        self.init_options, self.logged, self.finished, self.defined = [], [], 0, []
        self.config = SimpleNamespace(update=lambda values, **options: self.configs.append(values))
        self.configs: list = []

    def init(self, **options):
        self.init_options.append(options)
        return self

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1

    def Image(self, file):
        return Path(file).read_bytes()

    def Html(self, text):
        return text

    Markdown = Html


@pytest.fixture
def fake(monkeypatch):
    made = Fake()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(hosted, "find_spec", lambda name: object())
    return made


class Recorder:
    """A tracker of one's own."""

    def __init__(self) -> None:
        self.calls: list = []

    def hyperparameters(self, values):
        self.calls.append(("hyperparameters", values))

    def resume(self, step):
        self.calls.append(("resume", step))

    def scalars(self, step, values):
        self.calls.append(("scalars", step, values))

    def image(self, step, name, png):
        self.calls.append(("image", step, name))

    def text(self, step, name, text):
        self.calls.append(("text", step, name, text))

    def close(self):
        self.calls.append(("close",))


def test_names_are_grouped_and_recipes_flattened():
    names = ("loss", "validation/genome/loss", "seconds", "mfu")
    assert list(map(grouped, names)) == ["train/loss", "eval/genome/loss", "time/seconds", "time/mfu"]
    found = hyperparameters_of(tiny_recipe(ema=0.5))
    assert found["train.ema"] == 0.5
    assert found["data.seq_len"] == 32
    assert (found["optimizer"], found["optimizer.learning_rate"]) == ("AdamWConfig", 1e-2)
    assert found["data.fractions"] == "(0.8, 0.1, 0.1)"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_hosted_tracker_is_given_everything_under_grouped_names(fake, tmp_path, name):
    (tracker,) = open_trackers([name], (), tmp_path / "run")
    assert isinstance(tracker, Tracker)
    tracker.hyperparameters({"train.steps": 3})
    tracker.resume(2)
    tracker.scalars(3, {"loss": 1.5, "validation/loss": 2.5, "seconds": 9.0})
    tracker.image(3, "validation/patches", png(5, 2))
    tracker.text(3, "report", "<a>")
    with pytest.raises(ValueError, match="bytes of a PNG file"):
        tracker.image(3, "validation/patches", b"GIF89a" + bytes(30))
    tracker.close()
    scalars, image, text = (values for _, values in fake.logged)
    assert {k: v for k, v in scalars.items() if k != "step"} == {
        "train/loss": 1.5,
        "eval/loss": 2.5,
        "time/seconds": 9.0,
    }
    assert image["eval/patches"] == png(5, 2)
    assert "train/report" in text
    (options,) = fake.init_options
    assert options["project"] == "jaxblt"
    assert options["resume"] == "allow"
    assert fake.finished == 1
    if name == "wandb":
        assert fake.configs == [{"train.steps": 3}]
        assert fake.defined == [("*", "step")]
        assert [values["step"] for _, values in fake.logged] == [3, 3, 3]
        assert text["train/report"] == "<pre>&lt;a&gt;</pre>"
    else:
        assert options["config"] == {"train.steps": 3}
        assert [step for step, _ in fake.logged] == [3, 3, 3]
    known = options.get("id", options["name"])
    assert known == f"run-{run_id(tmp_path / 'run')}"


def test_a_missing_package_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(hosted, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"names 'wandb'.*not installed: pip install 'jaxblt\[wandb\]'"):
        fit(tiny_recipe(trackers=("jsonl", "wandb")), tmp_path / "run", source=Letters())
    assert not (tmp_path / "run").exists()
    check_trackers(("jsonl", "tensorboard"))


@pytest.mark.slow(days=28, group="costly")
def test_a_run_logs_to_the_trackers_that_it_names_and_to_given_ones(fake, tmp_path):
    own = Recorder()
    recipe = tiny_recipe(steps=6, eval_every=6, log_every=3, trackers=("jsonl", "trackio"))
    fit(recipe, tmp_path, source=Letters(), trackers=[own])
    assert not (tmp_path / "tensorboard").exists()
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == [call[1] for call in own.calls if call[0] == "scalars"] == [3, 6, 6]
    assert fake.init_options[0]["config"]["train.trackers"] == "('jsonl', 'trackio')"
    assert any("eval/bits_per_byte" in values for _, values in fake.logged)
    assert own.calls[-1] == ("close",)
    assert own.calls[1][0] == "hyperparameters"
    assert own.calls[1][1]["train.steps"] == 6


SMALL = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("recurrence",)))


@pytest.mark.slow(days=28, group="whole runs")
def test_events_hold_curves_hyperparameters_and_generated_text(tmp_path):
    recipe = tiny_recipe(model=SMALL, steps=6, eval_every=3, eval_batches=1, sample_bytes=8, ema=0.9)
    fit(recipe, tmp_path, source=Letters())
    found = events(tmp_path)
    assert [event.step for event in found.Scalars("eval/bits_per_byte")] == [3, 6]
    assert [event.step for event in found.Scalars("train/loss")] == [2, 4, 6]
    assert found.Scalars("time/seconds")
    drawn = [event.tensor_proto.string_val[0].decode() for event in found.Tensors("eval/sample")]
    assert len(drawn) == 2
    assert all(text.startswith("[") and set(text.partition("]")[0][1:]) <= set("ACGT") for text in drawn)
    assert "_hparams_/session_start_info" in found.Tags()["tensors"]


def test_samples_need_a_model_that_generates_and_evaluations():
    assert continuation_of(tiny_recipe()) is None
    with pytest.raises(ValueError, match=r"sample_bytes = 8 is read with eval_every above 0 only"):
        tiny_recipe(model=SMALL, sample_bytes=8, eval_every=0)
