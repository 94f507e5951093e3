"""Case and scored characters of a run's data, for records that come from elsewhere."""

import numpy as np
import pytest

from jaxblt.data import DataConfig, LabelledDataConfig, make_dataset
from jaxblt.data.letters import Letters, letters_of
from jaxblt.data.mixture import SourceConfig
from jaxblt.data.sources import BytesSource, Regions, document_ends, read_document
from jaxblt.data.vocab import BOS, EOS, OFFSET

GENES = SourceConfig(name="genes", paths=("g.fa",), kind="fasta", soft_mask="upper")
BOOKS = SourceConfig(name="books", paths=("b.txt",))


@pytest.mark.parametrize(
    ("data", "of_fasta", "upper", "scored"),
    [
        (DataConfig(), False, False, None),
        (DataConfig(kind="fasta", soft_mask="upper", scored="ACGT"), False, True, "ACGT"),
        (DataConfig(sources=(GENES, BOOKS)), False, False, None),
        (DataConfig(sources=(GENES, BOOKS)), True, True, None),
        (DataConfig(sources=(GENES,)), False, True, None),
        (LabelledDataConfig(paths=("g.fa",), soft_mask="upper"), False, True, None),
        (LabelledDataConfig(paths=("g.fa",)), True, False, None),
    ],
)
def test_letters_are_those_of_the_data(data, of_fasta, upper, scored):
    assert letters_of(data, of_fasta=of_fasta) == Letters(upper, scored)


def test_documents_are_raised_wherever_they_are_read():
    source = BytesSource([b"acgtN", b"x\xc3\xa9Y"], ["one", "two"])
    parts = Letters(upper=True).open(Regions(source, np.array([0, 1]), np.array([1, 0]), np.array([4, 4])))
    assert [read_document(parts, i) for i in range(2)] == [b"CGT", b"X\xc3\xa9Y"]
    assert list(parts.names) == ["one[1:4]", "two"]
    np.testing.assert_array_equal(document_ends(parts), [False, True])
    assert Letters().open(source) is source
    ids = Letters(upper=True).ids
    assert [ids[b] - OFFSET for b in b"aZ\xe9"] == [ord("A"), ord("Z"), 0xE9]


def test_only_scored_characters_count():
    counted = Letters(scored="ACGT").counted
    assert np.flatnonzero(counted).tolist() == sorted(byte + OFFSET for byte in b"ACGT")
    assert Letters().counted.all()
    assert not counted[[BOS, EOS]].any()


def test_documents_that_are_handed_over_are_read_as_those_of_the_config():
    """Training and evaluation on them, too: the setting would be read by nothing."""
    config = DataConfig(soft_mask="upper", seq_len=8, batch_size=1)
    rows = make_dataset(config, split="all", mode="eval", source=BytesSource([b"acgtn"]))
    assert rows.batch(0).targets[0, :5].tolist() == [byte + OFFSET for byte in b"ACGTN"]
