"""Sweeps: overrides to runs, one folder each, resumed, ranked, and refused before the first one starts."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxblt.cli.main import main
from jaxblt.cli.sweep import SweepOptions, named, option_pairs, read_changes, without_options
from jaxblt.training import sweep as training_sweep
from jaxblt.training.log.health import TrainingFailed
from jaxblt.training.sweep import Outcome, Ranking, Trial, default_ranking, table_of, write_table
from tests.compiled import compiled_once_and_quickly
from tests.training.tiny import Letters, tiny_recipe

FILE = """
from jaxblt.training.recipe import Recipe
from tests.training.tiny import tiny_recipe
def tiny() -> Recipe:
    data = {{"paths": ({text!r},)}}
    return tiny_recipe(data=data, steps=6, eval_every=3, eval_batches=1, log_every=3)
"""
RATES = ("0.02", "0.001")


@pytest.fixture(autouse=True, scope="module")
def _compiled_once_and_quickly(compiled):
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    text = np.random.default_rng(0).choice(list(b"ab"), 3000, p=(0.8, 0.2))
    (folder / "text.txt").write_bytes(bytes(text.tolist()))
    (folder / "mine.py").write_text(FILE.format(text=str(folder / "text.txt")), encoding="utf-8")
    return f"{folder / 'mine.py'}:tiny"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.slow(days=28, group="costly", turn="cli/test_sweep")
def test_a_sweep_trains_each_run_once_and_ranks_them(recipe, tmp_path, capsys):
    folder = tmp_path / "my sweep"
    argv = ["sweep", recipe, "--run-dir", str(folder), "--vary", f"optimizer.learning-rate={','.join(RATES)}"]
    assert main([*argv, "--train.time-limit-s", "1e-9"]) == 1
    stopped = json.loads((folder / "sweep.json").read_text())
    assert [run["status"] for run in stopped["runs"]].count("stopped") == 1
    assert names(folder) == {"learning-rate=0.02"}
    assert main(argv) == 0
    said, shown = capsys.readouterr()
    table = said.split("\n\n")[-2]
    for rate, text in zip(RATES, (said, said + shown), strict=True):
        assert f"next: jaxblt evaluate '{folder}/learning-rate={rate}'\n" in text
    ranked = json.loads((folder / "sweep.json").read_text())
    assert (ranked["metric"], ranked["order"]) == ("validation/bits_per_byte", "lowest")
    assert [run["changes"] for run in ranked["runs"]] == [{"optimizer.learning-rate": rate} for rate in RATES]
    best, worse = ranked["runs"]
    assert best["best"] < worse["best"]
    assert (best["status"], best["step"], best["best_step"]) == ("finished", 6, 6)
    header, *lines = (folder / "sweep.tsv").read_text().splitlines()
    assert header.split("\t")[:4] == ["run", "optimizer.learning-rate", "status", "step"]
    assert [line.split("\t")[1] for line in lines] == list(RATES)
    assert table.index("learning-rate=0.02") < table.index("learning-rate=0.001")
    files = {file: file.stat().st_mtime_ns for name in names(folder) for file in (folder / name).rglob("*")}
    assert main(argv) == 0
    assert "run 1 of 2" not in capsys.readouterr().out
    assert files == {
        file: file.stat().st_mtime_ns for name in names(folder) for file in (folder / name).rglob("*")
    }
    with pytest.raises(ValueError, match=r"run learning-rate=0.02: .*train.seed: 0 -> 1"):
        main([*argv, "--train.seed", "1"])


@pytest.mark.slow(days=28, group="costly")
def test_a_run_that_fails_by_any_error_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    errors = {"0": RuntimeError("RESOURCE_EXHAUSTED:\nout of memory"), "1": TrainingFailed("not finite")}

    def fit(recipe, run_dir, *, source):
        if run_dir.name in errors:
            raise errors[run_dir.name]
        return SimpleNamespace(finished=True)

    monkeypatch.setattr(training_sweep, "fit", fit)
    trials, said = [Trial(name, tiny_recipe()) for name in "012"], []
    ranking = Ranking("loss", higher=False)
    outcomes = training_sweep.sweep(trials, tmp_path, ranking, source=Letters(), say=said.append)
    status = ["failed: RuntimeError: RESOURCE_EXHAUSTED: out of memory", "failed: not finite", "finished"]
    assert [outcome.status for outcome in outcomes] == status
    assert [run["status"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == status
    assert said[1] == f"run 0 {status[0]}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--vary", "optimizer.learning-rat=1,2"],
            "run learning-rat=1: Unrecognized options: --optimizer",
        ),
        (
            ["--vary", "optimizer.learning-rate=1e-3,fast"],
            "run learning-rate=fast: .*expected a number, got 'fast'",
        ),
        (["--vary", "train.steps=6,-1"], "run steps=-1: .*TrainConfig.steps must be at least 1, got -1"),
        (["--vary", "data.batch-size=8,12"], "run batch-size=12: .*12"),
        (["--vary", "data.paths=none.txt"], "run paths=none.txt: .*none.txt"),
        (["--vary", "train.steps=6,6"], "two runs of the sweep are the same, steps=6"),
        (["--vary", "train.steps"], "--vary 'train.steps': expected OPTION=VALUE,VALUE"),
        (
            ["--vary", "train.steps=7", "--train.eval-every", "0"],
            "by validation/bits_per_byte: train.eval_every",
        ),
        ([], "give --runs FILE or --vary"),
    ],
)
def test_bad_overrides_are_refused_before_the_first_run(recipe, tmp_path, options, said):
    with pytest.raises((ValueError, OSError), match=said) as caught:
        main(["sweep", recipe, "--run-dir", str(tmp_path / "sweep"), *options])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "sweep").exists()


def test_a_file_holds_a_run_a_line(tmp_path):
    file = tmp_path / "runs.txt"
    file.write_text("# rates\n--optimizer.b1 0.8  # low\n\n--optimizer.b1=0.9 --data.fractions 0.8 0.1 0.1\n")
    changes = read_changes(SweepOptions(runs=str(file)))
    assert changes == [
        ["--optimizer.b1", "0.8"],
        ["--optimizer.b1=0.9", "--data.fractions", "0.8", "0.1", "0.1"],
    ]
    assert list(named(changes)) == ["b1=0.8", "b1=0.9,fractions=0.8_0.1_0.1"]
    assert option_pairs(changes[1]) == {"optimizer.b1": "0.9", "data.fractions": "0.8 0.1 0.1"}
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="the file holds no run"):
        read_changes(SweepOptions(runs=str(file)))


def test_varied_options_are_combined_and_names_stay_short():
    changes = read_changes(SweepOptions(vary=("a.dim=1,2", "b.dim=3", "objective=masked")))
    assert [words[1] for words in changes] == ["1", "2"]
    assert list(named(changes)) == ["a.dim=1,b.dim=3,objective=masked", "a.dim=2,b.dim=3,objective=masked"]
    (name,) = named([["--x", "y" * 300]])
    assert len(name) == 100
    assert without_options(["--run-dir", "x", "--vary=a", "--b", "1"], ("run-dir", "vary")) == ["--b", "1"]


def test_runs_without_the_metric_come_last_and_accuracy_counts_upwards(tmp_path):
    assert default_ranking(tiny_recipe(), "validation/accuracy", None).higher
    assert not default_ranking(tiny_recipe(), None, None).higher
    assert default_ranking(tiny_recipe(), None, "highest").higher
    ranking = Ranking("accuracy", True)
    assert ranking.best({2: 0.5, 4: 0.75, 6: 0.75}) == (4, 0.75)
    values = [None, 0.1, float("nan"), 0.9]
    assert sorted(values, key=ranking.key)[:2] == [0.9, 0.1]
    failed = Outcome("a", {}, "failed: steps\nare", 3, None, None, None, None)
    write_table(tmp_path, [failed], ranking)
    assert "failed" in table_of([failed], ranking)
