"""Runs that come with jaxblt: unpacked once, by hash, and never in front of a folder of that name."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import jaxblt
from jaxblt import boxed, recipes
from jaxblt.cli.main import main
from jaxblt.training.stored.resolved import learned_changes, read_resolved

PHASED = "order-5 counts of each place in the codon"
TEXT = b"It was a dark evening, and the old gentleman had gone to his room without a word to anybody."


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxblt" / "boxed"


@pytest.mark.slow(days=28, group="costly")
def test_english_knows_english(cache):
    """Far fewer bits than a byte has, and fewer than for the same letters in another order."""
    run = jaxblt.load("english")
    (folder,) = cache.iterdir()
    assert folder.name.startswith("english-")
    mixed = bytes(np.random.default_rng(0).permutation(np.frombuffer(TEXT, np.uint8)))
    bits = -run.score([TEXT, mixed]).log_likelihood / np.log(2) / len(TEXT)
    assert bits[0] < 2.5 < 4 < bits[1]


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(
        FileNotFoundError, match=r"englsh holds no run: .* did you mean 'english', which comes with"
    ):
        jaxblt.load("englsh")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/smal", r"config\.json does not exist; did you mean 'runs/small'\?$"),
        ("runs/x", r"; runs in 'runs' are big, small$"),
        ("runs", r"; runs in 'runs' are big, small$"),
        ("none/x", r"config\.json does not exist$"),
        ("runs/big/config.json", r"config\.json does not exist; it lies in a run: name 'runs/big'$"),
        ("runs/big/checkpoints/20", r"config\.json does not exist; it lies in a run: name 'runs/big'$"),
    ],
)
def test_a_run_that_does_not_exist_is_answered_with_those_beside_it(name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("small", "big"):
        (tmp_path / "runs" / run / "checkpoints" / "20").mkdir(parents=True)
        (tmp_path / "runs" / run / "config.json").touch()
    (tmp_path / "runs" / "smal.txt").touch()
    with pytest.raises(FileNotFoundError, match=said):
        jaxblt.load(name)


@pytest.mark.slow(days=28, group="costly")
def test_genes_and_proteins_know_their_letters(cache):
    """A reading frame is likelier than the same codons with one base moved to the end, a protein than its mirror."""
    protein = b"MSKIIGIDLGTTNSCVAVMEGGEPKVIENAEGARTTPSVVAFTKDGERLVGQPAKRQAVTNPENTIFSVKRLIGR"
    gene = b"".join(
        {
            b"M": b"ATG",
            b"S": b"AGC",
            b"K": b"AAA",
            b"I": b"ATT",
            b"G": b"GGC",
            b"D": b"GAT",
            b"L": b"CTG",
            b"T": b"ACC",
            b"N": b"AAC",
            b"C": b"TGC",
            b"V": b"GTG",
            b"A": b"GCG",
            b"E": b"GAA",
            b"P": b"CCG",
            b"R": b"CGT",
            b"F": b"TTT",
            b"Q": b"CAG",
        }[bytes([letter])]
        for letter in protein
    )
    for name, whole, other in (("genes", gene, gene[1:] + gene[:1]), ("proteins", protein, protein[::-1])):
        likely, unlikely = jaxblt.load(name).score([whole, other]).log_likelihood
        assert likely > unlikely + 10


def test_an_archive_that_changed_is_refused(cache, monkeypatch, tmp_path):
    (tmp_path / "english.zip").write_bytes(b"PK" + bytes(1000))
    monkeypatch.setattr(boxed, "HERE", tmp_path)
    monkeypatch.setattr(boxed, "boxed", lambda: {"english": {"sha256": "0" * 64}})
    with pytest.raises(
        ValueError, match=r"english\.zip has the SHA-256 [0-9a-f]{16}\.\.\., expected 0{16}\.\.\.: install"
    ):
        boxed.unpacked("english")
    assert not list(cache.iterdir())


def test_a_folder_of_that_name_goes_first(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert boxed.is_boxed("english")
    (tmp_path / "english").mkdir()
    assert not boxed.is_boxed("english")
    with pytest.raises(FileNotFoundError):
        jaxblt.load("english")


CALIBRATED = {"entropy_model", "patcher.threshold", "patcher.margin", "patcher.capacity"}


@pytest.mark.parametrize(
    ("name", "learned"),
    [("english", set()), ("english_patches", CALIBRATED), ("genes", set()), ("proteins", set())],
)
def test_a_run_is_of_the_recipe_of_its_name(cache, name, learned):
    """All but what was calibrated, and the entropy model that the recipe names by its run."""
    changed = learned_changes(read_resolved(name).recipe, recipes.get(name))
    assert {change.partition(":")[0].removeprefix("recipe.") for change in changed} == learned


def test_figures_are_those_of_the_record():
    record = Path(__file__).parents[1] / "experiments" / "results"
    runs = ("english", "boxed_run_english_patches", "boxed_run_proteins", "reading_frames")
    english, patches, proteins, genes, books, counts = (
        json.loads((record / f"{name}.json").read_text())
        for name in (*runs, "books_baselines", "proteins_baselines")
    )
    simple = [books["bits_per_byte"][name] for name in ("order-5 bytes", "bzip2", "xz")]
    expected = {
        "english": [*(english["boxed"][part]["bits_per_byte"] for part in ("books", "books_large")), *simple],
        "english_patches": [patches["bits_per_byte"], *simple],
        "genes": [
            *(genes["bits_per_base"][n] for n in ("genes", PHASED, "order-8 counts", "order-5 counts")),
            *(genes["open_frames"][n] for n in ("genes", PHASED, "order-5 counts")),
        ],
        "proteins": [proteins["bits_per_byte"], counts["bits_per_byte"]["order-2 bytes"]],
    }
    for name, figures in expected.items():
        told = boxed.boxed()[name]["figures"]
        assert [value for _, value in told] == [round(figure, 3) for figure in figures]
    assert f"{patches['bytes'] / 1000:.0f} KB" in boxed.boxed()["english_patches"]["figures"][0][0]


def test_the_folder_of_a_faster_process_is_kept(cache, monkeypatch):
    def rename(made, folder):
        folder.mkdir()
        (folder / "config.json").write_text("faster")
        raise OSError("Directory not empty")

    monkeypatch.setattr(Path, "rename", rename)
    assert (boxed.unpacked("english") / "config.json").read_text() == "faster"
    assert len(list(cache.iterdir())) == 1


def test_commands_list_runs_and_write_cards(cache, tmp_path, capsys):
    main(["models"])
    assert "english          English prose" in capsys.readouterr().out
    main(["card", "english", "--out", str(tmp_path / "card.md")])
    text = (tmp_path / "card.md").read_text(encoding="utf-8")
    about = json.loads((boxed.HERE / "boxed.json").read_text(encoding="utf-8"))["english"]
    assert all(line in text for line in (about["data"], about["limits"], "7,342,080 parameters"))
    with pytest.raises(FileExistsError, match="--overwrite"):
        main(["card", "english", "--out", str(tmp_path / "card.md")])


def test_a_run_is_pickled_and_copied() -> None:
    run = jaxblt.load("english_patches")
    text = [b"It was the best of times"]
    expected = run.score(text).log_likelihood
    for other in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        np.testing.assert_array_equal(other.score(text).log_likelihood, expected)
        assert other.recipe == run.recipe
        assert other.vocabulary is run.vocabulary
