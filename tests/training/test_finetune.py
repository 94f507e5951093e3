"""A run fine-tuned on labels: what it takes, freezes and learns, and that it is read back and goes on as any other."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxblt
from jaxblt.cli.main import main
from jaxblt.data import LabelledDataConfig
from jaxblt.training.finetune import finetune_recipe
from jaxblt.training.integrity import StateMismatch
from jaxblt.training.loop import fit
from jaxblt.training.state import BASE
from tests.compiled import compiled_once_and_quickly
from tests.finetuning import records, train_base, write_records

FROZEN = ("embedding/*", "stack/*/block_0/*")


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly(tmp_path_factory):
    with compiled_once_and_quickly(str(tmp_path_factory.mktemp("compiled"))):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the base run, the records, and a run that the command line fine-tuned with a part of the base frozen."""
    folder = tmp_path_factory.mktemp("finetune")
    train_base(folder / "base")
    write_records(folder)
    main(command(folder, 60))
    return folder


def command(folder, steps, *more):
    data = ["--data.paths", str(folder / "records.fa"), "--data.labels", str(folder / "labels.tsv")]
    rows = ["--data.batch-size", "16", "--data.fractions", "0.6", "0.2", "0.2", "--head.pool", "max"]
    train = ["--train.steps", str(steps), "--train.eval-every", "30", "--train.log-every", "30"]
    rate = ["--optimizer.learning-rate", "2e-2", "--optimizer.schedule", "constant"]
    run = ["--run-dir", str(folder / "run"), "--freeze", *FROZEN]
    return ["finetune", str(folder / "base"), *data, *rows, *train, *rate, *run, *more]


@pytest.fixture(scope="module")
def run(folder):
    return jaxblt.load(folder / "run")


def test_the_recipe_follows_from_base_and_data(run, folder):
    recipe = run.recipe
    assert recipe.data.classes == ("background", "promoter")
    assert (recipe.data.seq_len, recipe.data.soft_mask) == (64, "upper")
    assert (recipe.model.head.outputs, recipe.model.head.pool) == (2, "max")
    assert recipe.init_from == str(folder / "base")
    assert recipe.optimizer.warmup_steps == 30


def test_frozen_parameters_stay_and_others_learn(run, folder):
    base = flatten_dict(jaxblt.load(folder / "base").params, sep="/")
    found = flatten_dict(run.params, sep="/")
    still = flatten_dict(run.frozen[BASE].params, sep="/")
    assert set(found) - set(base) == {"label_head/outputs/kernel", "label_head/outputs/bias"}
    assert set(base) - set(found) == {"head/logits/kernel"}
    assert set(still) == {name for name in found if name.startswith("embedding/") or "/block_0/" in name}
    for name in set(found) & set(base):
        assert np.array_equal(found[name], base[name]) == (name in still), name
    with jaxblt_checkpoint(folder / "run") as stored:
        assert not any("/block_0/" in name or "embedding" in name for name in stored)


class jaxblt_checkpoint:
    """Names of all arrays of a run's newest checkpoint."""

    def __init__(self, run_dir):
        self.run_dir = run_dir

    def __enter__(self):
        from jaxblt.training.checkpoint import restore
        from jaxblt.training.integrity import named_leaves
        from jaxblt.training.resolved import checkpoint_dir

        names = []

        def look(stored):
            names.extend(named_leaves(stored))
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stored)

        restore(checkpoint_dir(self.run_dir), look)
        return names

    def __exit__(self, *exception):
        return None


def test_it_learns_and_its_predictions_name_classes(run, folder, tmp_path, capsys):
    found = run.evaluate("test")
    assert found["accuracy"] > 0.8
    assert {"mcc", "f1", "auroc", "auprc"} <= set(found)
    main(["evaluate", str(folder / "run"), "--predictions", str(tmp_path / "p.tsv"), "--step", "best"])
    assert '"accuracy"' in capsys.readouterr().out
    header, *rows = [line.split("\t") for line in (tmp_path / "p.tsv").read_text().splitlines()]
    assert header == ["name", "label", "background", "promoter", "prediction"]
    truth = {name: label for name, _, label in records()}
    assert len(rows) == found["bytes"]
    for name, label, *p, prediction in rows:
        assert truth[name] == label
        assert sum(map(float, p)) == pytest.approx(1, abs=1e-6)
        assert prediction == header[2 + int(np.argmax(list(map(float, p))))]
    right = sum(row[1] == row[-1] for row in rows) / len(rows)
    assert right == pytest.approx(jaxblt.load(folder / "run", step="best").evaluate("test")["accuracy"])
    main(["classify", str(folder / "run"), str(folder / "records.fa"), "--out", str(tmp_path / "all.tsv")])
    assert "240 records" in capsys.readouterr().out
    assert len((tmp_path / "all.tsv").read_text().splitlines()) == 241


def test_an_answer_does_not_depend_on_its_neighbours(run):
    sequences = [sequence for _, sequence, _ in records(count=12)]
    together = run.classify(sequences)
    assert together.names[:2] == ("0", "1")
    for i in (0, 5):
        alone = run.classify([sequences[i]])
        np.testing.assert_allclose(alone.probabilities[0], together.probabilities[i], rtol=1e-6)
    with pytest.raises(ValueError, match=r"record '0' has 64 bytes, and the run reads at most 63 behind BOS"):
        run.classify(["A" * 64])
    with pytest.raises(ValueError, match="was trained with objective Classify, expected NextByte"):
        run.score(sequences)
    assert run.embed(sequences[:2]).arrays[0].shape == (16,)


def test_a_run_says_what_it_took_and_draws_what_it_confuses(folder):
    events = b"".join(file.read_bytes() for file in (folder / "run" / "tensorboard").iterdir())
    for said in (
        b"taken           ",
        b"new             2 arrays: label_head/outputs/bias",
        b"frozen          ",
    ):
        assert said in events
    assert b"left behind     1 arrays: head/logits/kernel" in events
    assert (folder / "run" / "confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert b"validation/confusion" in events
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/auroc" in line for line in lines)
    assert any("mcc" in line for line in lines)


def test_it_goes_on_where_it_stopped(folder, tmp_path, capsys):
    main(command(folder, 60))
    assert "is finished: it is at step 60 of 60" in capsys.readouterr().out
    main(command(folder, 90, "--resume-with"))
    assert "going on from step 60" in capsys.readouterr().out
    assert jaxblt.load(folder / "run").step == 90


def test_bad_command_lines_of_finetune(folder, capsys):
    for words, said in (
        (["--freeze", "embeding/*"], r"freeze = 'embeding/*' matches none of"),
        (["--freeze", "label_head/*"], r"label_head/outputs/bias is new and frozen"),
        (["--data.label", "labl", "--data.labels", str(folder / "none.tsv")], "file does not exist"),
        (["--data.seq-len", "20"], "bytes, which do not fit behind BOS in rows of data.seq_len = 20"),
    ):
        with pytest.raises((ValueError, OSError)) as error:
            main([*command(folder, 60, *words), "--run-dir", str(folder / "other")])
        assert said in str(error.value)
        assert not (folder / "other").exists()
    with pytest.raises(SystemExit):
        main(["finetune", str(folder / "base"), "--head.pool", "median"])
    assert "median" in capsys.readouterr().err


def test_numbers_and_positions_are_learned_too(folder, tmp_path):
    """Length as a number, and each letter as its own class."""
    found = records(count=64)
    rows = [f"{len(s)},{s}\n" for _, s, _ in found]
    Path(tmp_path / "n.csv").write_text("label,sequence\n" + "".join(rows))
    base = finetune_recipe(folder / "base", data_of(tmp_path / "n.csv", "number"), pool="attention")
    assert (base.objective.center, base.model.head.outputs) == pytest.approx(
        (np.mean([len(s) for _, s, _ in found]), 1), rel=0.1
    )
    fitted = fit(short(base), tmp_path / "numbers")
    assert {"rmse", "pearson", "spearman"} <= set(fitted.validation)
    numbers = jaxblt.load(tmp_path / "numbers").classify([found[0][1]])
    assert 0 < numbers.predictions[0] < 100
    rows = [f"{s},{s.lower()}\n" for _, s, _ in found]
    Path(tmp_path / "p.csv").write_text("sequence,label\n" + "".join(rows))
    recipe = finetune_recipe(folder / "base", data_of(tmp_path / "p.csv", "positions"))
    assert recipe.data.classes == ("a", "c", "g", "t")
    assert fit(short(recipe), tmp_path / "positions").validation["accuracy"] > 0.9
    answers = jaxblt.load(tmp_path / "positions").classify([found[0][1]])
    answers.to_tsv(tmp_path / "p.tsv")
    name, said = (tmp_path / "p.tsv").read_text().splitlines()[1].split("\t")
    assert (name, len(said)) == ("0", len(found[0][1]))


def data_of(path, target):
    return LabelledDataConfig(
        paths=(str(path),), target=target, seq_len=64, batch_size=8, fractions=(0.6, 0.2, 0.2)
    )


def short(recipe):
    optimizer = replace(recipe.optimizer, learning_rate=3e-2, warmup_steps=2)
    train = replace(recipe.train, steps=24, eval_every=24, log_every=12, dtype="float32", keep_best=0)
    return replace(recipe, optimizer=optimizer, train=train)


def test_another_model_is_refused(folder):
    recipe = finetune_recipe(folder / "base", data_of(folder / "records.jsonl", "class"))
    with pytest.raises(StateMismatch, match=r"holds other parameters: .* is not there"):
        fit(short(replace(recipe, fresh=())), folder / "none")
    assert not (folder / "none").exists()
