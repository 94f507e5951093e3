"""Labelled intervals of a genome become a table that fine-tuning reads."""

import gzip

import pytest

from jaxblt.cli.data import main
from jaxblt.data import LabelledDataConfig
from jaxblt.data.labelled import read_parts

HEAD = "id,region,start,end,strand\n"


@pytest.fixture
def folder(tmp_path):
    """Ten intervals of training a class, of which one is named as Ensembl does; two of the test, one on strand -."""
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
    for label, begin in (("negative", 0), ("positive", 20)):
        rows = [f"{i},chr1,{begin + i},{begin + i + 4},+" for i in range(10)]
        (tmp_path / "train" / f"{label}.csv").write_text(HEAD + "\n".join(rows) + "\n")
    (tmp_path / "test" / "positive.csv.gz").write_bytes(gzip.compress(f"{HEAD}0,chr1,0,4,-\n".encode()))
    (tmp_path / "test" / "negative.csv").write_text(f"{HEAD}0,2,1,3,+\n")
    (tmp_path / "g.fa").write_text(f">1 first\n{'AACGT' * 8}\n>chr2\nTTGA\n")
    return tmp_path


def test_a_set_is_cut_and_read(folder, capsys):
    main(["cut", str(folder), str(folder / "g.fa"), str(folder / "out.csv")])
    assert "18 of train, 2 of validation, 2 of test" in capsys.readouterr().out
    parts = read_parts(LabelledDataConfig(paths=(str(folder / "out.csv"),), split="column", seq_len=8))
    found = sorted((one.sequence, one.labels) for one in parts["test"])
    assert found == [(b"CGTT", ("positive",)), (b"TG", ("negative",))]
    own = {one.name: one.sequence for part in ("train", "validation") for one in parts[part]}
    assert len(own) == 20
    assert (own["1:2-6+"], own["1:29-33+"]) == (b"CGTA", b"TAAC")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("0,chrX,0,4,+", "the genome has no record 'chrX', but 1"),
        ("0,chr1,0,99,+", "leaves the record"),
        ("0,chr1,a,4,+", r"negative.csv:2 is no row of region, start, end, strand"),
    ],
)
def test_bad_sets_are_refused(folder, row, said):
    (folder / "test" / "negative.csv").write_text(f"{HEAD}{row}\n")
    with pytest.raises(ValueError, match=said):
        main(["cut", str(folder), str(folder / "g.fa"), str(folder / "out.csv")])
    assert not (folder / "out.csv").exists()


def test_bad_calls_are_told(folder):
    with pytest.raises(ValueError, match="expected a folder, a genome and a file, got"):
        main(["cut", str(folder)])
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        main(["cut", str(folder), "g.fa", str(folder / "g.fa")])
    (folder / "train" / "negative.csv").unlink()
    (folder / "train" / "positive.csv").unlink()
    with pytest.raises(ValueError, match="has no intervals in train/"):
        main(["cut", str(folder), str(folder / "g.fa"), str(folder / "out.csv")])
