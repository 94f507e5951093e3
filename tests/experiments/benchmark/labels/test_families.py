"""The benchmark of protein families: classes are read from headers, words tell them, and its figures are complete."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark.labels.families import MODELS, SHARE, families, networks, write_table
from experiments.benchmark.labels.labelled_runs import data_of, earlier_runs, score_baselines
from tests.finetuning import write_base

RESIDUES = "acdefghiklmnpqrstvwy"


def write_domains(folder: Path, count: int = 60) -> Path:
    """Three superfamilies of equal size, each with a word of its own; the last two are of one fold."""
    rng = np.random.default_rng(0)
    words = {"a.1.1.1": "whw", "b.2.1.3": "cmc", "b.2.2.1": "yfy"}
    lines = []
    for i in range(3 * count):
        label, word = list(words.items())[i % 3]
        letters = "".join(RESIDUES[k] for k in rng.integers(0, 17, 24))
        place = rng.integers(0, 20)
        lines.append(
            f">d{i} {label} (A:) 3'->5' Domain {{Species}}\n{letters[:place]}\n{word}{letters[place:]}\n"
        )
    (folder / "domains.fa").write_text("".join(lines))
    return folder / "domains.fa"


@pytest.mark.parametrize(
    ("level", "labels"),
    [("fold", {"a.1", "b.2"}), ("superfamily", {"a.1.1", "b.2.1", "b.2.2"})],
)
def test_a_class_is_as_deep_as_asked(tmp_path: Path, level: str, labels: set[str]) -> None:
    found = write_table(write_domains(tmp_path), tmp_path / "t.csv", level, 5, 30)
    rows = [line.split(",") for line in (tmp_path / "t.csv").read_text().splitlines()[1:]]
    assert {label for _, label in rows} == labels
    assert found == {
        "domains": 180,
        "classes": len(labels),
        "largest_class": 120 if level == "fold" else 60,
    }
    assert all(sequence.isupper() and len(sequence) == 27 for sequence, _ in rows)


def test_small_classes_and_long_domains_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "d.fa").write_text(
        "".join(
            f">d{i} {label} x\n{sequence}\n"
            for i, (label, sequence) in enumerate(
                [
                    ("a.1.1.1", "AC"),
                    ("a.1.1.2", "AD"),
                    ("b.1.1.1", "AE"),
                    ("b.1.1.1", "ae"),
                    ("c.1.1.1", "ACDEF"),
                ]
            )
        )
    )
    with pytest.raises(ValueError, match=r"1 classes of at least 2 domains: lower --members"):
        write_table(tmp_path / "d.fa", tmp_path / "t.csv", "superfamily", 2, 4)
    (tmp_path / "e.fa").write_text(">d1 hemoglobin\nAC\n")
    with pytest.raises(ValueError, match="header 'd1 hemoglobin' names no class"):
        write_table(tmp_path / "e.fa", tmp_path / "t.csv", "superfamily", 2, 4)


def test_words_tell_superfamilies(tmp_path: Path) -> None:
    write_table(write_domains(tmp_path), tmp_path / "t.csv", "superfamily", 5, 30)
    runs = score_baselines(data_of(tmp_path / "t.csv", 0, 8, group_share=SHARE), (3,))
    found = {run["model"]: run["accuracy"] for run in runs}
    assert found["kmers"] > 0.9
    assert found["nearest"] > 0.4


def test_a_call_without_its_file_can_be_repeated(tmp_path: Path) -> None:
    """The folder for its tables is there then, and empty."""
    given = (str(tmp_path / "astral.fa"), str(tmp_path / "f.json"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"astral\.fa"):
            families(*given, work=str(tmp_path / "work"))


def test_seeds_are_added_to_a_file(tmp_path: Path) -> None:
    out, figures = tmp_path / "f.json", {"settings": {"seen": (1, 2)}}
    assert earlier_runs(str(out), figures, range(1)) == []
    out.write_text(json.dumps(figures | {"runs": [{"seed": 0}]}))
    assert earlier_runs(str(out), figures, range(1, 3)) == [{"seed": 0}]
    with pytest.raises(ValueError, match=r"runs of seeds \[0\] already"):
        earlier_runs(str(out), figures, range(2))
    with pytest.raises(ValueError, match="measured with other settings"):
        earlier_runs(str(out), {"settings": {}}, range(1, 2))


def test_networks_go_the_way_of_their_base(tmp_path: Path) -> None:
    """A base that predicts the next residue is causal, and so is the objective of all models beside it."""
    write_table(write_domains(tmp_path), tmp_path / "t.csv", "superfamily", 5, 30)
    write_base(tmp_path / "base")
    data = data_of(tmp_path / "t.csv", 0, 8, group_share=SHARE)
    made = networks(tmp_path / "base", data, steps=10, dropout=0.3)
    assert list(made) == ["finetuned", "bytes", "cnn"]
    assert [recipe.model.causal for recipe in made.values()] == [True] * 3
    words = [
        [pattern for pattern, _ in recipe.optimizer.rates if "words" in pattern] for recipe in made.values()
    ]
    assert words == [["label_head/*words/outputs/*"], ["label_head/*words/outputs/*"], []]


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_family_figures(tmp_path: Path) -> None:
    out, work = tmp_path / "figures.json", str(tmp_path / "work")
    file = str(write_domains(tmp_path, 40))
    sizes = {"members": 5, "batch_size": 16, "dim": 64, "layers": 4, "kmer": 2, "dtype": "float32"}
    options = sizes | {"seeds": 1, "base_steps": 2, "steps": 4}
    families(file, str(out), work=work, **options)
    found = json.loads(out.read_text())
    assert tuple(run["model"] for run in found["runs"]) == MODELS
    assert all({"accuracy", "mcc", "f1", "seconds"} <= set(run) for run in found["runs"])
    assert found["records"]["classes"] == 3
    found_sizes = {run["model"]: run.get("parameters_without_hash_tables") for run in found["runs"]}
    assert found_sizes["finetuned"] == found_sizes["bytes"]
    assert found_sizes["cnn"] == pytest.approx(found_sizes["bytes"], rel=0.1)
    read = (tmp_path / "work" / "base_0.fa").read_text().count(">")
    assert 90 <= read <= 108  # of 120 domains those of neither validation nor test
