"""The promoter benchmark: its words are counted right, its CNN has the size asked for, and its figures are complete."""

import json
import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark._cnn import equal_size
from experiments.benchmark._kmers import count_kmers, score_kmers
from experiments.benchmark._labelled import count_wins
from experiments.benchmark.promoters import MODELS, promoters, write_table
from jaxblt.training.flops import count_params
from tests.finetuning import records, write_base


def test_words_are_counted() -> None:
    counts = count_kmers([b"ACGTAC", b"AANA"], 2)
    assert counts.shape == (2, 20)
    assert counts[0, :4].tolist() == [2, 2, 1, 1]
    assert counts[0, 4 + 1] == 2  # AC
    assert counts[1].tolist() == [3, 0, 0, 0, 1] + [0] * 15


def test_words_tell_a_motif() -> None:
    found = [(s.encode(), int(label == "promoter")) for _, s, label in records()]
    parts = {"train": found[:120], "validation": found[120:180], "test": found[180:]}
    scored = score_kmers({n: ([s for s, _ in p], np.array([y for _, y in p])) for n, p in parts.items()}, 3)
    assert scored["auroc"] > 0.9
    assert scored["parameters"] == 4 + 16 + 64 + 1


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
        mcc = {"kmers": 0.5, "finetuned": finetuned, "probe": 0.4, "cnn": 0.6}
        return [{"seed": seed, "model": name, "mcc": value} for name, value in mcc.items()]

    found = [*runs(0, 0.7), *runs(1, 0.55), *runs(2, 0.9)[:3]]
    assert count_wins(found, "finetuned", MODELS, "mcc") == 1


@pytest.mark.slow(weeks=26, group="scripts leave their figures")
def test_promoter_figures(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_files(tmp_path)
    out, work = tmp_path / "figures.json", str(tmp_path / "work")
    options = {"positive": ("yes",), "negative": ("no",), "seeds": 1, "steps": 4, "batch_size": 16, "kmer": 2}
    promoters(str(tmp_path), str(tmp_path / "base"), str(out), work, **options)
    found = json.loads(out.read_text())
    assert [run["model"] for run in found["runs"]] == ["kmers", "finetuned", "probe", "cnn"]
    assert all(
        {"mcc", "auroc", "auprc", "accuracy", "f1", "parameters", "seconds"} <= set(r) for r in found["runs"]
    )
    assert found["records"] == {"promoter": 120, "other": 120}
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        promoters(str(tmp_path), str(tmp_path / "base"), str(out), work, **options)
