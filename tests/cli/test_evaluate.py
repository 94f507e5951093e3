"""What `jaxblt evaluate` reads and writes: other files, nothing from elsewhere without trust, no file twice."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import jaxblt
from jaxblt.cli.evaluate import evaluate
from jaxblt.cli.evaluation_data import find_data
from jaxblt.data import DataConfig, LabelledDataConfig, TaskDataConfig
from jaxblt.data.tasks import MQAR
from tests.answers.runs import markov_run, random_probabilities
from tests.answers.test_score import by_hand

OPTIONS = {"seq_len": None, "context": None}
URL = "https://elsewhere.example/genome.fa"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which every run's folder holds a run on letters of a genome that lies elsewhere."""
    data = {"kind": "fasta", "paths": (URL,), "soft_mask": "upper", "scored": "ACGT", "eos": False}
    run = markov_run(random_probabilities(), **data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jaxblt, "load", lambda run_dir, *, step=None, weights=None: run)
    Path("g.fa").write_text(">one\nNNGATTACA\n")
    Path("h.fa").write_text(">two\nacgt\n")
    return run


def test_files_are_read_as_the_runs_data_and_whole(here):
    p = random_probabilities()
    found = evaluate("run", files=("g.fa", "h.fa"), out="figures.json")
    nats = [*by_hand(p, b"NNGATTACA", False)[2:], *by_hand(p, b"ACGT", False)]
    assert found["bytes"] == 11
    assert found["loss"] == pytest.approx(-np.mean(nats), rel=1e-5)
    assert json.loads(Path("figures.json").read_text())["split"] == "all"
    with pytest.raises(FileExistsError, match=r"--out figures\.json is there already"):
        evaluate("run", files=("g.fa",), out="figures.json")
    evaluate("run", files=("g.fa",), out="figures.json", overwrite=True)
    for out in ("h.fa", "./h.fa"):
        with pytest.raises(ValueError, match=r"is read by this command, as h\.fa"):
            evaluate("run", files=("g.fa", "h.fa"), out=out, overwrite=True)


def test_what_a_strangers_config_names_is_fetched_only_with_trust(here, monkeypatch):
    with pytest.raises(
        ValueError, match=f"the run's config names {URL}.*--trust-sources.*or name other data"
    ):
        evaluate("run")
    fetched = []
    monkeypatch.setattr(
        "jaxblt.data.sources.files.cached_copies", lambda url: fetched.append(url) or [Path("h.fa")]
    )
    assert evaluate("run", split="all", trust_sources=True)["bytes"] == 4
    assert fetched == [URL]


def test_paths_of_another_machine_are_told(here):
    data = dataclasses.replace(here.recipe.data, paths=("/theirs/genome.fa",))
    object.__setattr__(here, "recipe", dataclasses.replace(here.recipe, data=data))
    with pytest.raises(
        FileNotFoundError, match=r"theirs/genome\.fa.*maybe on another machine: name files .* --files"
    ):
        evaluate("run")


def test_labelled_files_bring_their_labels():
    own = LabelledDataConfig(
        paths=("a.fa",), labels="a.tsv", classes=("no", "yes"), split="files", test_paths=("b.fa",)
    )
    data, split, source = find_data(own, ("c.fa",), "c.tsv", None, OPTIONS)
    assert (data.paths, data.labels, data.classes, split, source) == (
        ("c.fa",),
        "c.tsv",
        ("no", "yes"),
        "all",
        None,
    )
    assert (data.split, data.test_paths) == ("hash", ())
    assert find_data(own, (), None, None, OPTIONS) == (own, "test", None)


def test_files_that_a_run_cannot_read_are_refused():
    task = TaskDataConfig(task=MQAR(), seq_len=256)
    with pytest.raises(ValueError, match=r"--files c\.fa: the run was trained on a task"):
        find_data(task, ("c.fa",), None, None, OPTIONS)
    with pytest.raises(ValueError, match=r"--labels c\.tsv is of --files with records"):
        find_data(DataConfig(), ("c.fa",), "c.tsv", None, OPTIONS)
