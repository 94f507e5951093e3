"""A run fine-tuned on labels: what it takes, freezes and learns, and that it is read back and goes on as any other."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jaxblt
from jaxblt.cli.finetune import parse_finetune
from jaxblt.cli.label_comparison import compare
from jaxblt.cli.main import main
from jaxblt.data import LabelledDataConfig, NearCopyWarning, with_classes
from jaxblt.data.sources import reverse_complement
from jaxblt.evaluation.label_baselines import read_split, score_markov
from jaxblt.models import WordsConfig
from jaxblt.parallel import MeshConfig
from jaxblt.training.finetune import finetune_recipe
from jaxblt.training.loop import fit
from jaxblt.training.start.frozen import load_frozen
from jaxblt.training.state import BASE
from jaxblt.training.stored.integrity import StateMismatch
from jaxblt.training.stored.resolved import read_resolved
from tests.docs.documents import ROOT, blocks
from tests.finetuning import records, write_base, write_records
from tests.tolerances import assert_close

BASE_RUN, RUN = "runs/ecoli", "runs/promoters"
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "finetune.md").read_text(encoding="utf-8")
TASKS = re.compile("## Several tasks at once\n.*?(?=\n## )", re.DOTALL)
"""The section whose examples `test_finetune_tasks.py` runs."""
OF_THE_RUN = pytest.mark.slow(days=28, group="costly", turn="training/test_finetune")
FROZEN = ("embedding/*", "stack/*/block_0/*")


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    """Where tests are: a base run and records."""
    folder = tmp_path_factory.mktemp("finetune")
    write_base(folder / BASE_RUN)
    write_records(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def command(steps, *more):
    data = ["--data.paths", "promoters.fa", "--data.labels", "labels.tsv"]
    rows = ["--data.batch-size", "16", "--data.fractions", "0.6", "0.2", "0.2", "--head.pool", "max"]
    train = ["--train.steps", str(steps), "--train.eval-every", "20", "--train.log-every", "20"]
    rate = ["--optimizer.learning-rate", "2e-2", "--optimizer.schedule", "constant"]
    return ["finetune", BASE_RUN, *data, *rows, *train, *rate, "--run-dir", RUN, "--freeze", *FROZEN, *more]


@pytest.fixture(scope="module")
def run(folder):
    """A run that the command line fine-tuned, part of its base frozen."""
    main(command(40))
    return jaxblt.load(RUN)


@OF_THE_RUN
def test_the_recipe_follows_from_base_and_data(run):
    recipe = run.recipe
    assert recipe.data.classes == ("background", "promoter")
    assert (recipe.data.seq_len, recipe.data.soft_mask) == (64, "upper")
    assert (recipe.model.head.outputs, recipe.model.head.pool) == (2, "max")
    assert recipe.init_from == BASE_RUN
    assert recipe.optimizer.warmup_steps == 20
    assert recipe.model.head.words == WordsConfig("dna", 6)
    assert recipe.optimizer.rates == (("label_head/*words/outputs/*", 0.0),)


@OF_THE_RUN
def test_it_starts_as_the_regression_on_words_and_is_told_beside_baselines(run, capsys):
    """The start is evaluated and kept where it is the best, so that validation never says less than words do."""
    lines = [json.loads(line) for line in (Path(RUN) / "metrics.jsonl").read_text().splitlines()]
    start = next(line for line in lines if "validation/accuracy" in line)
    assert start["step"] == 0
    best = jaxblt.load(RUN, step="best")
    assert best.evaluate("validation")["accuracy"] >= start["validation/accuracy"] > 0.8
    capsys.readouterr()
    main(["evaluate", RUN, "--step", "best"])
    told = capsys.readouterr()
    figures, split = json.loads(told.out), read_split(run.recipe.data)
    assert list(figures["baselines"]) == ["markov", "nearest", "kmers"]
    assert figures["baselines"]["markov"]["mcc"] == score_markov(split)["mcc"]
    assert "this run" in told.err
    for mcc, said in (
        (-1.0, "a simple baseline is ahead: "),
        (1.0, "this run is no worse than the baselines: mcc 1.0"),
    ):
        assert compare(run.recipe.data, {"accuracy": 1.0, "mcc": mcc}).lines[-1].startswith(said)


@OF_THE_RUN
def test_a_run_that_reads_both_strands_learns_and_answers(run):
    main(command(4, "--run-dir", "runs/both", "--head.strands", "both", "--no-baselines"))
    both = jaxblt.load("runs/both", step=4)
    assert (both.recipe.model.strands, both.recipe.model.head.words) == ("both", WordsConfig("dna", 6, True))
    kernel = [
        one.params["label_head"]["outputs"]["kernel"] for one in (both, jaxblt.load("runs/both", step=0))
    ]
    assert not np.array_equal(*kernel)
    sequences = [sequence for _, sequence, _ in records(8)]
    found, other = (
        both.classify(given).probabilities
        for given in (sequences, [reverse_complement(s.encode()) for s in sequences])
    )
    assert_close(other, found)


def test_both_strands_are_of_dna():
    with open("peptides.csv", "w", encoding="utf-8") as file:
        file.write(
            "sequence,label\n" + "".join(f"MKLVINQ{'ACDEFGHIKL'[i]}W,{'ab'[i % 2]}\n" for i in range(10))
        )
    data = LabelledDataConfig(paths=("peptides.csv",), fractions=(0.6, 0.2, 0.2), seq_len=64)
    with pytest.raises(ValueError, match="strands = 'both' are of DNA, and the training records are protein"):
        finetune_recipe(BASE_RUN, data, strands="both")


@OF_THE_RUN
def test_the_tutorial_gives_a_table_and_a_picture(run):
    names = {}
    for text in blocks(ROOT / "docs" / "tutorials" / "own-labels.md", "python"):
        exec(compile(text, "own-labels.md", "exec"), names)
    accuracy = names["table"]["accuracy"]
    assert accuracy.value == pytest.approx(names["run"].evaluate("test")["accuracy"])
    assert accuracy.low <= accuracy.value <= accuracy.high
    assert Path("substitutions.png").stat().st_size


@OF_THE_RUN
def test_frozen_parameters_stay_and_others_learn(run):
    base = flatten_dict(jaxblt.load(BASE_RUN).params, sep="/")
    found = flatten_dict(run.params, sep="/")
    still = flatten_dict(load_frozen(RUN, read_resolved(RUN))[BASE].params, sep="/")
    words = {f"label_head/words/{name}" for name in ("rarity", "outputs/kernel", "outputs/bias")}
    assert set(found) - set(base) == {"label_head/outputs/kernel", "label_head/outputs/bias"} | words
    assert set(base) - set(found) == {"head/logits/kernel"}
    assert set(still) == {name for name in found if name.startswith("embedding/") or "/block_0/" in name}
    for name in set(found) & set(base):
        assert np.array_equal(found[name], base[name]) == (name in still), name
    with jaxblt_checkpoint(RUN) as stored:
        assert not any("/block_0/" in name or "embedding" in name for name in stored)


class jaxblt_checkpoint:
    """Names of all arrays of a run's newest checkpoint."""

    def __init__(self, run_dir):
        self.run_dir = run_dir

    def __enter__(self):
        from jaxblt.training.stored.checkpoint import restore
        from jaxblt.training.stored.integrity import named_leaves
        from jaxblt.training.stored.resolved import checkpoint_dir

        names = []

        def look(stored):
            names.extend(named_leaves(stored))
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), stored)

        restore(checkpoint_dir(self.run_dir), look)
        return names

    def __exit__(self, *exception):
        return None


@OF_THE_RUN
def test_it_learns_and_its_predictions_name_classes(run, tmp_path, capsys):
    found = run.evaluate("test")
    assert found["accuracy"] > 0.8
    assert {"mcc", "f1", "auroc", "auprc"} <= set(found)
    main(["evaluate", RUN, "--predictions", str(tmp_path / "p.tsv"), "--step", "best", "--no-baselines"])
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
    assert right == pytest.approx(jaxblt.load(RUN, step="best").evaluate("test")["accuracy"])
    main(["classify", RUN, "promoters.fa", "--out", str(tmp_path / "all.tsv")])
    assert "240 records" in capsys.readouterr().out
    assert len((tmp_path / "all.tsv").read_text().splitlines()) == 241


@OF_THE_RUN
def test_labels_of_other_numbers_are_not_scored(run, tmp_path):
    """The classes of another file, sorted, would be compared with those of the run that have the same numbers."""
    rows = [{"sequence": letters, "label": f"no {label}"} for _, letters, label in records(count=12)]
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, rows)))
    other = with_classes(LabelledDataConfig(paths=(str(tmp_path / "other.jsonl"),), seq_len=64, batch_size=8))
    with pytest.raises(
        ValueError, match=r"the run learned labels of classes = \('background', 'promoter'\), and"
    ):
        run.evaluate("all", data=other)


@OF_THE_RUN
def test_an_answer_does_not_depend_on_its_neighbours(run):
    sequences = [sequence for _, sequence, _ in records(count=12)]
    together = run.classify(sequences)
    assert together.names[:2] == ("0", "1")
    on_mesh = run.classify(sequences, mesh=MeshConfig(data=2, seq=4))
    assert_close(on_mesh.probabilities, together.probabilities, n=64)
    lower = [sequence.lower() for sequence in sequences]
    np.testing.assert_array_equal(run.classify(lower).probabilities, together.probabilities)
    as_they_are = run.classify(lower, as_trained=False)
    assert np.abs(np.log(as_they_are.probabilities / together.probabilities)).max() > 1e-2
    for i in (0, 5):
        alone = run.classify([sequences[i]])
        np.testing.assert_allclose(alone.probabilities[0], together.probabilities[i], rtol=1e-6)
    with pytest.raises(ValueError, match=r"record '0' has 64 bytes, and the run reads at most 63 behind BOS"):
        run.classify(["A" * 64])
    with pytest.raises(ValueError, match="was trained with objective Classify, expected NextByte"):
        run.score(sequences)
    assert run.embed(sequences[:2]).arrays[0].shape == (16,)


@OF_THE_RUN
def test_a_table_is_not_read_as_one_record(run, tmp_path):
    (tmp_path / "r.tsv").write_text("id\tsequence\nr\tACGT\n")
    with pytest.raises(
        ValueError,
        match=r"r.tsv' ends in .tsv, and would be read as one record, its names and numbers too: give",
    ):
        run.classify(tmp_path / "r.tsv")


@OF_THE_RUN
@pytest.mark.usefixtures("run")
def test_a_run_says_what_it_took_and_draws_what_it_confuses(folder):
    events = b"".join(file.read_bytes() for file in (folder / RUN / "tensorboard").iterdir())
    for said in (
        b"taken           ",
        b"new             5 arrays: label_head/outputs/bias",
        b"frozen          ",
    ):
        assert said in events
    assert b"left behind     1 arrays: head/logits/kernel" in events
    assert (folder / RUN / "confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert b"eval/confusion" in events
    lines = [json.loads(line) for line in (folder / RUN / "metrics.jsonl").read_text().splitlines()]
    assert any("validation/auroc" in line for line in lines)
    assert any("mcc" in line for line in lines)


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_that_its_time_limit_ends_before_an_evaluation_is_compared(capsys):
    limit = ["--train.time-limit-s", "1e-3", "--train.no-eval-start"]
    main([f"{RUN} short" if word == RUN else word for word in command(40, *limit)])
    said = capsys.readouterr().out
    assert "this run" in said
    assert f"next: jaxblt evaluate '{RUN} short' --predictions" in said


@OF_THE_RUN
@pytest.mark.usefixtures("run")
def test_it_goes_on_where_it_stopped(capsys):
    main(command(40))
    assert "is finished: it is at step 40 of 40" in capsys.readouterr().out
    main(command(60, "--resume-with"))
    assert "going on from step 40" in capsys.readouterr().out
    assert jaxblt.load(RUN).step == 60


def test_bad_command_lines_of_finetune(capsys):
    for words, said in (
        (["--freeze", "embeding/*"], r"freeze = 'embeding/*' matches none of"),
        (["--freeze", "label_head/*"], r"label_head/outputs/bias is new and frozen"),
        (["--data.label", "labl", "--data.labels", "none.tsv"], "file does not exist"),
        (["--data.seq-len", "20"], "bytes, which do not fit behind BOS in rows of data.seq_len = 20"),
    ):
        with pytest.raises((ValueError, OSError)) as error:
            main([*command(40, *words), "--run-dir", "other"])
        assert said in str(error.value)
        assert not Path("other").exists()
    with pytest.raises(SystemExit):
        main(["finetune", BASE_RUN, "--head.pool", "median"])
    assert "median" in capsys.readouterr().err


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(("target", "crf"), [("number", False), ("positions", False), ("positions", True)])
def test_numbers_and_positions_are_learned_too(target, crf, tmp_path, capsys):
    """Length as a number, beside its baselines; each letter as its own class."""
    found = records(count=64)
    rows = [f"{s},{len(s) if target == 'number' else s.lower()}\n" for _, s, _ in found]
    Path(tmp_path / "r.csv").write_text("sequence,label\n" + "".join(rows))
    pool = "attention" if target == "number" else "mean"
    recipe = finetune_recipe(BASE_RUN, data_of(tmp_path / "r.csv", target), pool=pool, crf=crf)
    validation = fit(short(recipe), tmp_path / "run").validation
    answers = jaxblt.load(tmp_path / "run").classify([found[0][1]])
    answers.to_tsv(tmp_path / "p.tsv")
    name, said = (tmp_path / "p.tsv").read_text().splitlines()[1].split("\t")
    assert name == "0"
    if target == "number":
        assert recipe.objective.center == pytest.approx(np.mean([len(s) for _, s, _ in found]), rel=0.1)
        assert {"rmse", "pearson", "spearman"} <= set(validation)
        assert 10 < float(said) < 60
        capsys.readouterr()
        main(["evaluate", str(tmp_path / "run")])
        told = capsys.readouterr()
        assert list(json.loads(told.out)["baselines"]) == ["mean", "nearest", "words"]
        assert "spearman" in told.err.splitlines()[-1]
    else:
        assert recipe.data.classes == ("a", "c", "g", "t")
        assert validation["accuracy"] > 0.9
        assert len(said) == len(found[0][1])


def data_of(path, target):
    return LabelledDataConfig(
        paths=(str(path),), target=target, seq_len=64, batch_size=8, fractions=(0.6, 0.2, 0.2)
    )


def short(recipe):
    optimizer = replace(recipe.optimizer, learning_rate=3e-2, warmup_steps=2)
    train = replace(recipe.train, steps=24, eval_every=24, log_every=12, dtype="float32", keep_best=0)
    return replace(recipe, optimizer=optimizer, train=train)


def test_near_copies_across_a_split_are_told(tmp_path):
    """A record without its first letter is a near-copy of the whole one."""
    rows = "".join(f"{s},{label}\n{s[1:]},{label}\n" for _, s, label in records(count=60) if len(s) > 24)
    (tmp_path / "r.csv").write_text("sequence,label\n" + rows)
    config = data_of(tmp_path / "r.csv", "class")
    with pytest.warns(
        NearCopyWarning, match=r"\d\d% of \d+ sampled .*: data.split = 'groups' keeps near-copies"
    ):
        finetune_recipe(BASE_RUN, config)
    assert finetune_recipe(BASE_RUN, replace(config, split="groups")).data.split == "groups"
    told = parse_finetune([BASE_RUN, "--data.paths", str(tmp_path / "r.csv"), "--data.split", "groups"])
    assert told[0].data.split == "groups"


def test_another_model_is_refused():
    recipe = finetune_recipe(BASE_RUN, data_of("promoters.jsonl", "class"))
    with pytest.raises(StateMismatch, match=r"holds other parameters: .* is not there"):
        fit(short(replace(recipe, fresh=())), "none")
    assert not Path("none").exists()


@OF_THE_RUN
@pytest.mark.usefixtures("run")
def test_examples_of_the_guide_run(capsys):
    blocks = re.findall(r"```(\w*)\n(.*?)```", TASKS.sub("", GUIDE), re.DOTALL)
    lines = [line.split() for kind, block in blocks if not kind for line in block.splitlines()]
    assert [words[1] for words in lines] == ["finetune", "evaluate", "classify"]
    recipe, run_dir, _ = parse_finetune(lines[0][2:])
    assert (recipe.name, run_dir) == ("base_finetuned", RUN)
    for words in lines[1:]:
        main(words[1:])
    namespace = {}
    examples = [block for kind, block in blocks if kind == "python"]
    assert len(examples) == 3
    for example in examples:
        exec(compile(example, "finetune.md", "exec"), namespace)
    assert "('background', 'promoter')" in capsys.readouterr().out
    assert all(Path(name).stat().st_size for name in ("predictions.tsv", "labelled.tsv", "found.tsv"))
