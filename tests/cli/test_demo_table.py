"""The demo's table says why where counting bytes beats its model."""

from types import SimpleNamespace

import pytest

from jaxblt.cli import demo
from jaxblt.data import samples
from jaxblt.data.sources import BytesSource
from jaxblt.recipes import get


@pytest.fixture
def short_book(monkeypatch):
    """The book's first 4,000 bytes, whose counts take no time."""
    whole = samples.sample_source("book")
    monkeypatch.setattr(
        samples, "sample_source", lambda _: BytesSource([whole.documents[0][:4000]], whole.names)
    )
    monkeypatch.setattr("jaxblt.data.config.sample_source", samples.sample_source)


@pytest.mark.parametrize(("bits", "explained"), [(7.9, True), (0.1, False)])
def test_one_line_says_why_counts_win(bits, explained, short_book, capsys):
    model = SimpleNamespace(
        recipe=get("demo"), step=220, evaluate=lambda split, *, data: {"bits_per_byte": bits}
    )
    demo._compare(model, model)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("the order-5 model is ahead at this size") is explained
    assert ("220 steps of a network" in last) is explained
