"""What is a URL, and where none may stand."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxblt.answers.tables import write_tsv
from jaxblt.cli.main import main
from jaxblt.data import BytesSource, write_entropies
from jaxblt.data.entropies import read_entropies
from jaxblt.data.sources import TextSource
from jaxblt.data.tasks.babi import read_subset
from jaxblt.remote import url_of
from jaxblt.training.log.runlog import RunLog
from jaxblt.training.loop import fit
from jaxblt.training.stored.checkpoint import Checkpointer
from tests.training.tiny import tiny_recipe


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/run/", "s3://bucket/run"),
        (Path("gs://bucket/run"), "gs://bucket/run"),
        ("HF://datasets/a/b.txt", "hf://datasets/a/b.txt"),
        ("https://host/a?b=c//d", "https://host/a?b=c//d"),
        ("file:///data/a", "file:///data/a"),
        (Path("file:///data/a"), "file:///data/a"),
        ("C:/runs/a", None),
        ("runs/s3://b", None),
        ("runs/a:b", None),
        ("", None),
    ],
)
def test_urls(path, url):
    assert url_of(path) == url


WRITERS = {
    "checkpoints": lambda url: Checkpointer(url),
    "log": lambda url: RunLog(url),
    "table": lambda url: write_tsv(url, ["a"], []),
    "entropies": lambda url: write_entropies(f"{url}/e.npy", BytesSource([b"a"]), [np.zeros(2)]),
    "read entropies": lambda url: read_entropies(f"{url}/e.npy", BytesSource([b"a"])),
    "task": lambda url: read_subset(url, "en"),
    "demo": lambda url: main(["demo", "--run-dir", url]),
    "export": lambda url: main(["export", "runs/a", "--out", f"{url}/a.safetensors"]),
    "import": lambda url: main(["import", "a.safetensors", "--out", f"{url}/a"]),
    "new": lambda url: main(["new", f"{url}/a.py"]),
    "evaluate": lambda url: main(["evaluate", "runs/a", "--out", f"{url}/a.json"]),
    "score": lambda url: main(["score", "runs/a", "a.fa", "--out", f"{url}/a.tsv"]),
    "embed": lambda url: main(["embed", "runs/a", "a.fa", "--out", f"{url}/a.npz"]),
    "classify": lambda url: main(["classify", "runs/a", "a.fa", "--out", f"{url}/a.tsv"]),
    "variants": lambda url: main(["variants", "runs/a", "a.vcf", "a.fa", "--out", f"{url}/a.tsv"]),
    "plot": lambda url: main(["patch", "a.txt", "--mode", "space", "--plot", f"{url}/a.png"]),
    "prompts": lambda url: main(["generate", "runs/a", "--prompts-file", f"{url}/a.txt"]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_folder_is_named_after_a_scheme(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"='s3://bucket/run\S*' is remote: s3:// cannot be used here; name a local"
    ):
        WRITERS[name]("s3://bucket/run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["https", "hf"])
def test_a_run_is_not_trained_on_what_is_read_only(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"run_dir='{scheme}://a/run': a run cannot be trained on {scheme}://"
    ):
        fit(tiny_recipe(), f"{scheme}://a/run")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"hf://datasets/a/b\.txt needs .*: pip install 'jaxblt\[remote\]'"):
        TextSource("hf://datasets/a/b.txt")
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    with pytest.raises(ImportError, match=r"s3://bucket/b\.txt needs .*: pip install 'jaxblt\[remote\]'"):
        TextSource("s3://bucket/b.txt")


def test_an_unknown_scheme_is_named():
    with pytest.raises(
        ValueError, match="zz://a/b: Protocol not known: zz; expected s3://, gs://, hf:// or https://"
    ):
        TextSource("zz://a/b")
