"""A run fine-tuned on two tasks at once, by the command line; and what the guide says of it."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.finetune import parse_finetune
from jaxblt.cli.main import main
from jaxblt.data import LabelledDataConfig, LabelTask
from jaxblt.training.finetune import finetune_recipe
from jaxblt.training.loop import fit
from jaxblt.training.start.compile_ahead import abstract_batch
from jaxblt.training.start.setup import open_data
from jaxblt.training.stored.resolved import recipe_from_json
from jaxblt.training.stored.serialize import to_json
from tests.compiled import compiled_once_and_quickly
from tests.finetuning import records, write_base
from tests.training.test_finetune import GUIDE, TASKS

BASE_RUN, RUN = "runs/ecoli", "runs/two"
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", "".join(TASKS.findall(GUIDE)), re.DOTALL)


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """Where tests are: a base run, and records with empty cells of either label."""
    folder = tmp_path_factory.mktemp("tasks")
    write_base(folder / BASE_RUN)
    rows = []
    for i, (name, sequence, kind) in enumerate(records()):
        share = sum(sequence.count(letter) for letter in "GC") / len(sequence)
        rows.append(
            f"{name},{sequence},{kind if i % 5 else ''},{f'{100 * share:.2f}' if i % 3 else ''},{i % 7}\n"
        )
    (folder / "two.csv").write_text("id,sequence,kind,gc,hardness\n" + "".join(rows))
    with pytest.MonkeyPatch.context() as patch, compiled_once_and_quickly(str(folder / "compiled")):
        patch.chdir(folder)
        yield folder


def command(*more, steps=40):
    data = [
        "--data.paths",
        "two.csv",
        "--data.batch-size",
        "16",
        "--data.fractions",
        "0.6",
        "0.2",
        "0.2",
    ]
    tasks = ["--tasks.classes", "kind", "--tasks.numbers", "gc", "--head.pool", "max"]
    train = ["--train.steps", str(steps), "--train.eval-every", "20", "--train.log-every", "20"]
    rate = ["--optimizer.learning-rate", "2e-2", "--optimizer.schedule", "constant"]
    return ["finetune", BASE_RUN, *data, *tasks, *train, *rate, "--run-dir", RUN, *more]


@pytest.mark.slow(days=28, group="whole runs")
def test_two_tasks_are_learned_at_once(capsys, tmp_path):
    order = ["--data.easy-first", "10", "--data.difficulty", "hardness"]
    words = command("--tasks.weighting", "uncertainty", "--train.best-by", "kind/mcc", *order)
    recipe, run_dir, _ = parse_finetune(words[1:])
    fit(recipe, run_dir, devices=jax.devices()[:1])
    said = capsys.readouterr().out
    assert re.search(r"task kind: 2 classes; labels of 1\d\d of 1\d\d train, \d+ of \d+ validation", said)
    assert re.search(r"step 40: validation \S+ kind/mcc \(kind \S+, gc \S+\)", said)
    lines = [json.loads(line) for line in Path(RUN, "metrics.jsonl").read_text().splitlines()]
    learnt = [line["gc/weight"] for line in lines if "gc/weight" in line]
    assert len(learnt) == 2
    assert learnt[0] != learnt[1]
    scored = [line["validation/kind/mcc"] for line in lines if "validation/kind/mcc" in line]
    best = jaxblt.load(RUN, step="best")
    assert best.step == 20 * int(np.argmax(scored))  # the first evaluation is of the start
    assert Path(RUN, "confusion_kind.png").read_bytes()[:4] == b"\x89PNG"
    assert Path(RUN, "tensorboard").is_dir()

    main(
        ["evaluate", RUN, "--step", "best", "--predictions", str(tmp_path / "p.tsv"), "--out", "figures.json"]
    )
    found = json.loads(Path("figures.json").read_text())
    assert found["kind/accuracy"] > 0.8
    assert found["gc/pearson"] > 0.3
    assert {"kind/auroc", "kind/f1", "gc/rmse", "gc/spearman", "gc/weight", "loss"} <= found.keys()
    header, *rows = [line.split("\t") for line in (tmp_path / "p.tsv").read_text().splitlines()]
    assert header[:4] == ["name", "kind/label", "kind/background", "kind/promoter"]
    assert header[4:] == ["kind/prediction", "gc/label", "gc/prediction"]
    held = [row for row in rows if row[1]]
    assert 0 < len(held) < len(rows)
    assert np.mean([row[1] == row[4] for row in held]) == pytest.approx(found["kind/accuracy"])
    errors = [float(row[6]) - float(row[5]) for row in rows if row[5]]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(found["gc/rmse"], rel=1e-4)

    answers = best.classify([sequence for _, sequence, _ in records(count=3)])
    assert (len(answers), answers["gc"].classes, answers["kind"].classes) == (
        3,
        (),
        best.recipe.data.tasks[0].classes,
    )
    assert "promoter" in answers.summary()
    read = recipe_from_json(to_json(best.recipe))
    assert read == best.recipe


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize("weighting", ["gradnorm", "dwa"])
def test_weights_follow_gradients_or_losses_and_go_on(weighting, monkeypatch):
    """They are stored with the parameters, and sum to the number of tasks."""
    monkeypatch.setattr("jaxblt.training.objectives.balance.WINDOW", 2)
    more = ["--tasks.weighting", weighting, "--data.batch-size", "32", "--run-dir", f"runs/{weighting}"]
    for steps in (6, 8):
        recipe, run_dir, _ = parse_finetune(command(*more, steps=steps)[1:])
        fit(recipe, run_dir, devices=jax.devices()[:1], resume_with=steps > 6)
    run = jaxblt.load(run_dir)
    weights = np.asarray(run.params["label_head"]["task_weights"])
    assert run.step == 8
    assert weights.sum() == pytest.approx(2, rel=1e-5)
    assert np.abs(weights - 1).max() > 1e-5  # states say nothing at first, and have small gradients
    assert not np.any(run.params["label_head"].get("probes", 0))
    found = run.evaluate("validation")
    np.testing.assert_allclose([found["kind/weight"], found["gc/weight"]], weights, rtol=1e-5)


def test_the_shapes_of_a_batch_are_known_ahead():
    """Batches hold the labels of tasks as a plan expects them."""
    data = LabelledDataConfig(
        paths=("two.csv",),
        tasks=(LabelTask("kind"), LabelTask("gc", "number")),
        seq_len=64,
        batch_size=8,
    )
    recipe = finetune_recipe(BASE_RUN, data, weights={"gc": 0.25})
    assert [task.weight for task in recipe.objective.tasks] == [1.0, 0.25]
    mesh = recipe.mesh.build()
    planned, batch = abstract_batch(recipe, mesh), open_data(recipe, mesh).batch(0)
    for name, array in batch.labels.items():
        assert (planned.labels[name].shape, planned.labels[name].dtype) == (array.shape, array.dtype)


def test_bad_command_lines_of_several_tasks():
    for words, said in (
        (
            ["--tasks.weights", "size", "2"],
            "there is a weight 2.0 for task 'size', and the tasks are kind, gc",
        ),
        (
            ["--tasks.weighting", "uncertainty", "--tasks.weights", "gc", "2"],
            "leave the weights out, or set weighting",
        ),
        (
            ["--tasks.classes", "kind", "sort"],
            "has no column 'sort', it has ['id', 'sequence', 'kind', 'gc', 'hard",
        ),
        (["--head.crf"], "LabelHeadConfig.crf scores a byte's class behind another"),
        (["--data.target", "number"], "say it of each task, and leave these out"),
        (
            ["--train.best-by", "gc/mcc"],
            "train.best_by = 'gc/mcc' is no figure of MultiTask: take one of loss, kind/",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            main([*command(*words), "--run-dir", "other"])
        assert not Path("other").exists()


@pytest.mark.slow(days=28, group="costly")
def test_examples_of_the_guide_run(capsys):
    lines = [line.split() for kind, block in BLOCKS if not kind for line in block.splitlines()]
    shown = [words for words in lines if words[:2] == ["jaxblt", "finetune"]]
    assert len(shown) == 2
    recipes = [parse_finetune(words[2:])[0] for words in shown]
    assert [recipe.objective.weighting for recipe in recipes] == ["fixed", "uncertainty"]
    assert [task.weight for task in recipes[0].objective.tasks] == [1.0, 0.5]
    assert [recipe.train.best_by for recipe in recipes] == [None, "kind/mcc"]
    for example in (block for kind, block in BLOCKS if kind == "python"):
        exec(compile(example, "finetune.md", "exec"), {})
    assert "kind" in capsys.readouterr().out
