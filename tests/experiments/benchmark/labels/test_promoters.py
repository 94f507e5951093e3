"""The promoter benchmark: its CNN has the size asked for, its splits hold no near-copies, its figures are complete."""

import json
import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.labels.cnn import equal_size
from experiments.benchmark.labels.promoters import (
    MODELS,
    count_wins,
    data_of,
    earlier_runs,
    promoters,
    write_table,
)
from jaxblt.evaluation.label_baselines import read_split
from jaxblt.training.flops import count_params
from tests.finetuning import records, write_base


@pytest.mark.parametrize("count", [20_000, 300_000])
def test_the_cnn_has_the_size_asked_for(count: int) -> None:
    config = equal_size(count, 2)
    ids = jnp.zeros((1, 32), jnp.int32)
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), ids)["params"]
    assert count_params(shapes)[0] == pytest.approx(count, rel=0.1)


def write_files(folder: Path) -> None:
    sides = {"yes": "promoter", "no": "background"}
    for name, label in sides.items():
        lines = "".join(f">{record}\n{s}\n" for record, s, kind in records() if kind == label)
        (folder / f"{name}.fa.xz").write_bytes(lzma.compress(lines.encode()))


def test_a_sequence_stands_once_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "yes.fa").write_text(">a\nACGT\n>b\nacgt\n>c\nAAAA\n")
    (tmp_path / "no.fa").write_text(">a\nAAAA\n>b\nCCCC\n")
    assert write_table(tmp_path, tmp_path / "t.csv", ("yes",), ("no",)) == {"promoter": 1, "other": 1}
    assert (tmp_path / "t.csv").read_text().split() == ["sequence,label", "ACGT,promoter", "CCCC,other"]


def test_a_win_is_over_all_others() -> None:
    def runs(seed: int, finetuned: float) -> list[dict]:
        mcc = {"markov": 0.3, "nearest": 0.2, "kmers": 0.5, "start": 0.5}
        mcc |= {"finetuned": finetuned, "probe": 0.4, "cnn": 0.6}
        return [{"seed": seed, "model": name, "mcc": value} for name, value in mcc.items()]

    found = [*runs(0, 0.7), *runs(1, 0.55), *runs(2, 0.9)[:5]]
    assert count_wins(found, "finetuned", MODELS, "mcc") == 1
    assert count_wins([*found, {"seed": 0, "model": "dropout", "mcc": 0.8}], "finetuned", MODELS, "mcc") == 1


def test_no_word_of_a_genome_lies_in_two_parts(tmp_path: Path) -> None:
    """Overlapping stretches of a genome: by a hash nearly every one in the test part overlaps one of training."""
    rng = np.random.default_rng(0)
    genome = "".join("ACGT"[i] for i in rng.integers(0, 4, 12_000))
    stretches = {genome[i : i + 81] for i in rng.integers(0, len(genome) - 81, 240)}
    (tmp_path / "yes.fa").write_text("".join(f">{i}\n{s}\n" for i, s in enumerate(sorted(stretches))))
    (tmp_path / "no.fa").write_text(">a\nACGT\n")
    write_table(tmp_path, tmp_path / "t.csv", ("yes",), ("no",))
    parts = read_split(data_of(tmp_path / "t.csv", 0, 8))
    words = {
        part: {s[i : i + 21] for s in found for i in range(len(s) - 20)} for part, (found, _) in parts.items()
    }
    assert min(len(found) for found, _ in parts.values()) >= 20
    assert not words["train"] & words["test"]
    assert not words["train"] & words["validation"]


def test_seeds_are_added_to_a_file(tmp_path: Path) -> None:
    out, figures = tmp_path / "f.json", {"settings": {"seen": (1, 2)}}
    assert earlier_runs(str(out), figures, range(1)) == []
    out.write_text(json.dumps(figures | {"runs": [{"seed": 0}]}))
    assert earlier_runs(str(out), figures, range(1, 3)) == [{"seed": 0}]
    with pytest.raises(ValueError, match=r"runs of seeds \[0\] already"):
        earlier_runs(str(out), figures, range(2))
    with pytest.raises(ValueError, match="measured with other settings"):
        earlier_runs(str(out), {"settings": {}}, range(1, 2))


@pytest.mark.slow(days=28, group="costly", turn="experiments/benchmark/labels/test_promoters")
def test_baselines_need_no_run(tmp_path: Path) -> None:
    write_files(tmp_path)
    out = tmp_path / "figures.json"
    promoters(
        str(tmp_path), str(out), work=str(tmp_path / "work"), positive=("yes",), negative=("no",), seeds=2
    )
    found = json.loads(out.read_text())
    assert (found["benchmark"], found["base_run"]) == ("promoter_baselines", None)
    assert [run["model"] for run in found["runs"]] == ["markov", "nearest", "kmers", "start"] * 2


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_promoter_figures(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_files(tmp_path)
    out, work = tmp_path / "figures.json", str(tmp_path / "work")
    options = {"positive": ("yes",), "negative": ("no",), "seeds": 1, "steps": 4, "batch_size": 16}
    promoters(str(tmp_path), str(out), str(tmp_path / "base"), work, **options)
    found = json.loads(out.read_text())
    assert tuple(run["model"] for run in found["runs"]) == MODELS
    assert all({"mcc", "auroc", "auprc", "accuracy", "f1", "seconds"} <= set(r) for r in found["runs"])
    assert found["records"] == {"promoter": 120, "other": 120}
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        promoters(str(tmp_path), str(out), str(tmp_path / "base"), work, **options)
