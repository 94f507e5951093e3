"""Python in guides that load runs, with what they would call in place of a run."""

import inspect
from types import SimpleNamespace

import jaxblt
import jaxblt.inference
from jaxblt.inference.requests import lay_out
from tests.docs.documents import ROOT, blocks

GUIDES = ROOT / "docs" / "guides"


def test_run_md_mixes_sources_and_streams(monkeypatch):
    asked = []

    def generate(decoder, params, prompts, *, max_new_bytes, sampling, stream):
        asked.append(lay_out(prompts, max_new_bytes, sampling, 0))
        assert stream
        yield [b"one", b"two"]

    assert (
        inspect.signature(generate).parameters.keys()
        <= inspect.signature(jaxblt.inference.generate).parameters.keys()
    )
    monkeypatch.setattr(jaxblt.inference, "generate", generate)
    names = {"run": SimpleNamespace(decoder=None, decoder_params=None)}
    for text in blocks(GUIDES / "run.md", "python"):
        exec(compile(text, "run.md", "exec"), names)
    assert [source.name for source in names["data"].sources] == ["books", "genome"]
    assert (names["first"], names["second"], len(asked)) == (b"one", b"two", 1)


def test_remote_md_loads_a_run(monkeypatch):
    signature, calls = inspect.signature(jaxblt.load), []
    monkeypatch.setattr(
        jaxblt, "load", lambda *args, **options: calls.append(signature.bind(*args, **options))
    )
    for text in blocks(GUIDES / "remote.md", "python"):
        exec(compile(text, "remote.md", "exec"), {})
    assert [call.arguments["run_dir"] for call in calls] == ["s3://bucket/runs/books"]
