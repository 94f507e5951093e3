"""URLs that a run's config names are fetched only if its reader says so."""

import pytest

from jaxblt.data import DataConfig, LabelledDataConfig, TaskDataConfig
from jaxblt.data.mixture import SourceConfig
from jaxblt.data.tasks import Babi
from jaxblt.data.trust import check_trusted

URL = "https://elsewhere.example/books.txt"


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(paths=("here.txt", URL)),
        DataConfig(sources=(SourceConfig(name="books", paths=(URL,)),)),
        DataConfig(paths=("g.fa",), kind="fasta", bed="s3://bucket/a.bed"),
        LabelledDataConfig(paths=("g.fa",), labels="hf://datasets/a/b.tsv"),
        TaskDataConfig(task=Babi(path="https:/elsewhere.example/en"), seq_len=2048),
    ],
)
def test_a_url_of_the_config_needs_trust(data):
    with pytest.raises(ValueError, match=r"the run's config names (https|s3|hf)://.*say --trust-sources"):
        check_trusted(data, data, trust_sources=False)
    check_trusted(data, data, trust_sources=True)


def test_local_paths_and_urls_of_the_caller_are_read():
    own = DataConfig(paths=("/data/a.txt", "~/b*.txt", "file:///data/c.txt"))
    check_trusted(own, own, trust_sources=False)
    check_trusted(own, DataConfig(paths=(URL,)), trust_sources=False)
