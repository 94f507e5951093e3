"""The guide's examples run, and the commands write what the methods return."""

import re
from pathlib import Path

import numpy as np
import pytest

import jaxblt
from jaxblt.cli import answers as commands
from jaxblt.cli.generate import generate

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "answers.md").read_text(encoding="utf-8")


@pytest.fixture
def here(runs, monkeypatch, tmp_path):
    """A folder with a reference and its variants, in which every run's folder holds the same run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxblt.run.load", lambda run_dir, *, step=None, weights=None: runs["bytes"])
    bases = "".join("ACGT"[i] for i in np.random.default_rng(0).integers(0, 4, 200))
    Path("genome.fa").write_text(f">one\n{bases}\n")
    Path("genes.fa").write_text("".join(f">{i}\n{bases[i * 20 : i * 20 + 60]}\n" for i in range(7)))
    Path("calls.vcf").write_text(f"one\t100\trs1\t{bases[99]}\t{bases[99]}A\n")


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_examples_run(here, runs, monkeypatch, capsysbinary):
    namespace = {"jaxblt": jaxblt}
    examples = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(examples) == 8
    for example in examples:
        exec(compile(example, "answers.md", "exec"), namespace)
    assert all(Path(name).stat().st_size for name in ("scores.tsv", "states.npz", "effects.tsv"))
    assert len(namespace["effects"]) == 1
    ((call, around),) = namespace["around"].items()
    assert (len(around), around[5:6].decode()) == (11, call.split()[1][0])
    told = capsysbinary.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(jaxblt, "load", lambda *_, **options: runs["bytes"])
    options = {"max_new_bytes": 256, "temperature": 1.0, "drafts": 8}
    assert generate("run", prompts=("Once",), **options) == namespace["texts"]
    assert capsysbinary.readouterr().err == b"drafts: " + told + b"\n"


def test_commands_write_what_the_methods_return(here, runs):
    run, out = runs["bytes"], Path("out")
    said = commands.score(Path("run"), Path("genome.fa"), out=out / "scores.tsv", both_strands=True)
    expected = run.score("genome.fa", both_strands=True)
    _, row = (out / "scores.tsv").read_text().splitlines()
    assert row.split("\t")[0] == "one"
    assert float(row.split("\t")[3]) == pytest.approx(expected.log_likelihood[0], rel=1e-8)
    assert said == f"1 records, 200 bytes, {expected.bits_per_byte[0]:.4f} bits per byte, in out/scores.tsv"
    said = commands.embed(Path("run"), Path("genome.fa"), out=out / "states.npz")
    with np.load(out / "states.npz") as stored:
        np.testing.assert_array_equal(stored["states"][0], run.embed("genome.fa").arrays[0])
    assert said == "1 records, 1 states of width 16 from layer final, in out/states.npz"
    said = commands.variants(
        Path("run"), Path("calls.vcf"), Path("genome.fa"), out=out / "effects.tsv", context=64
    )
    effect = run.variants("calls.vcf", "genome.fa", context=64).score[0]
    assert float((out / "effects.tsv").read_text().split()[-4]) == pytest.approx(effect, rel=1e-7)
    assert said == f"1 variants, {int(effect > 0)} likelier than the reference, in out/effects.tsv"
    with Path("calls.vcf").open("a") as file:
        file.write("one\t100\t.\tA\t*\ntwo\t1\t.\tA\tC\n")
    said = commands.variants(
        Path("run"), Path("calls.vcf"), Path("genome.fa"), out=out / "some.tsv", context=64, skip=True
    )
    kinds = "1 spanning deletion (*), 1 contig that the FASTA file lacks skipped"
    assert said == f"1 variants, {int(effect > 0)} likelier than the reference, {kinds}, in out/some.tsv"
    assert (out / "some.tsv").read_bytes() == (out / "effects.tsv").read_bytes()
    with pytest.raises(
        ValueError, match=r"line 2, one:100 A>\*: spanning deletion \(\*\), which has no score"
    ):
        commands.variants(Path("run"), Path("calls.vcf"), Path("genome.fa"), out=out / "none.tsv")
    assert not (out / "none.tsv").exists()
