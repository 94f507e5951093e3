"""The embedded samples are what their notice says."""

import hashlib
import lzma
from importlib import resources

import pytest

from jaxblt.data import SAMPLES, load_sample, read_document, sample_source


@pytest.mark.parametrize("name", SAMPLES)
def test_the_bytes_are_those_of_the_notice(name):
    folder = resources.files("jaxblt.data") / "samples"
    data = lzma.decompress((folder / SAMPLES[name].file).read_bytes())
    notice = (folder / "NOTICE.txt").read_text()
    assert f"{SAMPLES[name].file}\n" in notice
    assert hashlib.sha256(data).hexdigest() in notice


def test_they_are_small():
    folder = resources.files("jaxblt.data") / "samples"
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 300_000


def test_the_book_the_declaration_and_the_genome():
    assert load_sample("book").startswith(b"# Title: The Time Machine\n")
    genome = load_sample("lambda")
    assert len(genome) == 48_502
    assert genome.startswith(b"GGGCGGCGACCTCGCGGGTTTTCGC")
    assert set(genome) == set(b"ACGT")
    declaration = sample_source("udhr")
    texts = {n: read_document(declaration, i).decode() for i, n in enumerate(declaration.names)}
    assert len(texts) == 18
    assert "All human beings are born free and equal" in texts["eng"]
    assert "世界人权宣言" in texts["cmn_hans"]
    assert b"".join(t.encode() for t in texts.values()) == load_sample("udhr")


def test_an_unknown_sample_is_named():
    with pytest.raises(ValueError, match="unknown sample 'ecoli': choose one of 'book', 'udhr', 'lambda'"):
        load_sample("ecoli")
