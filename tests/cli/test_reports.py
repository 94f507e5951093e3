"""Commands of answers over regions of a genome: records, tracks, motifs and pictures."""

from pathlib import Path

import numpy as np
import pytest

from jaxblt.answers import Attributions, Mutagenesis
from jaxblt.answers.reports.pictures import plot_motifs
from jaxblt.cli import answers as commands
from jaxblt.cli.attributions import attributions
from tests.answers.reports.test_motifs import CORE, records
from tests.answers.runs import MarkovConfig, make_run, random_probabilities


@pytest.fixture
def run(monkeypatch):
    import jax.numpy as jnp

    params = {"logits": jnp.log(jnp.asarray(random_probabilities(), jnp.float32))}
    data = {"kind": "fasta", "soft_mask": "upper", "scored": "ACGT"}
    run = make_run(MarkovConfig(), params=params, data=data)
    monkeypatch.setattr("jaxblt.run.load", lambda run_dir, *, step=None, weights=None: run)
    return run


@pytest.fixture
def genome(tmp_path):
    (tmp_path / "g.fa").write_text(">chr1\nACGTTGCAacGGA\n")
    (tmp_path / "a.gtf").write_text(
        'chr1\tx\tgene\t3\t8\t.\t-\t.\tgene_id "g";\nchr1\tx\tCDS\t1\t9\t.\t+\t.\t\n'
    )
    return tmp_path / "g.fa"


def test_scores_of_regions_become_a_track(run, genome, tmp_path):
    out, track = tmp_path / "s.tsv", tmp_path / "s.bedgraph"
    options = {"regions": tmp_path / "a.gtf", "feature": "gene"}
    said = commands.score(Path("run"), genome, out=out, track=track, **options)
    assert said.endswith(f"in {out} and {track}")
    header, row = out.read_text().splitlines()
    assert (header.split("\t")[-1], row.split("\t")[:2]) == ("bits_per_byte", ["chr1:2-8 g", "6"])
    nats = run.score([b"TGCAAC"], per_byte=True).per_byte[0]  # the other strand of GTTGCA
    values = [line.split("\t") for line in track.read_text().splitlines()]
    assert [int(row[1]) for row in values] == list(range(2, 8))
    np.testing.assert_allclose([float(row[3]) for row in values], nats[::-1], rtol=1e-6)
    with pytest.raises(ValueError, match="--feature gene is of the lines of --regions"):
        commands.embed(Path("run"), genome, out=tmp_path / "e.npz", feature="gene")
    with pytest.raises(ValueError, match=r"--out .*x.bw is read by this command"):
        commands.score(Path("run"), genome, out=tmp_path / "x.bw", track=tmp_path / "x.bw")


def test_records_without_a_scored_byte_are_counted(run, genome, tmp_path):
    genome.write_text(">chr1\nACGT\n>gap\nNNNN\n")
    said = commands.score(Path("run"), genome, out=tmp_path / "s.tsv")
    assert "bits per byte, 1 record without a byte that is scored (--no-as-trained" in said


def test_attributions_become_a_table_a_track_motifs_and_a_picture(run, genome, monkeypatch, tmp_path):
    sequences, values = records()
    names, zeros = tuple(f"r{i}" for i in range(len(sequences))), np.zeros(len(sequences))
    found = Attributions(names, tuple(sequences), tuple(values), zeros, zeros)
    monkeypatch.setattr("jaxblt.run.Run.attributions", lambda *args, **options: found)
    fasta = tmp_path / "r.fa"
    fasta.write_text("".join(f">{n}\n{s.decode()}\n" for n, s in zip(names, sequences, strict=True)))
    files = {"out": tmp_path / "a.tsv", "track": tmp_path / "a.bw", "motifs": tmp_path / "m.meme"}
    said = attributions(Path("run"), fasta, **files, picture=tmp_path / "a.svg")
    assert said.startswith("120 records, 9,600 bytes, in ")
    assert CORE in said
    assert all(path.stat().st_size for path in (*files.values(), tmp_path / "a.svg"))
    with pytest.raises(FileExistsError, match=r"--motifs .* is there already"):
        attributions(Path("run"), fasta, out=tmp_path / "b.tsv", motifs=tmp_path / "m.meme")
    with pytest.raises(ValueError, match=r"--picture a.txt must end in one of .png, .svg, .pdf"):
        attributions(Path("run"), fasta, out=tmp_path / "b.tsv", picture=Path("a.txt"))
    with pytest.raises(ValueError, match="there is no motif to plot"):
        plot_motifs([])


def test_a_picture_is_drawn_although_there_is_no_motif(run, monkeypatch, tmp_path):
    zeros = np.zeros(1)
    found = Attributions(("r",), (b"ACGT" * 20,), (np.zeros(80),), zeros, zeros)
    monkeypatch.setattr("jaxblt.run.Run.attributions", lambda *args, **options: found)
    monkeypatch.setattr("jaxblt.answers.reports.motifs.find_motifs", lambda *args, **options: [])
    (tmp_path / "r.fa").write_text(">r\n" + "ACGT" * 20)
    files = {"out": tmp_path / "a.tsv", "motifs": tmp_path / "m.meme", "picture": tmp_path / "a.svg"}
    with pytest.raises(ValueError, match="no motif was found"):
        attributions(Path("run"), tmp_path / "r.fa", **files)
    assert {path.name for path in tmp_path.glob("[am].*")} == {"a.tsv", "a.svg"}


def test_substitutions_become_a_heat_map(run, genome, monkeypatch, tmp_path):
    table = Mutagenesis(("r",), (b"ACNGT" * 30,), "ACGT", (np.random.default_rng(0).normal(size=(150, 4)),))
    monkeypatch.setattr("jaxblt.run.Run.mutagenesis", lambda *args, **options: table)
    said = commands.mutagenesis(Path("run"), genome, out=tmp_path / "m.tsv", picture=tmp_path / "m.png")
    assert said == f"1 records, 150 positions x 4 letters, in {tmp_path / 'm.tsv'} and {tmp_path / 'm.png'}"
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"
