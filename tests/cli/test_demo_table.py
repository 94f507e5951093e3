"""The demo's table has the model, what it started from, and counts."""

from types import SimpleNamespace

from jaxblt.cli import demo
from jaxblt.data import samples
from jaxblt.data.sources import BytesSource
from jaxblt.recipes import get


def test_the_table_names_what_it_compares(monkeypatch, capsys):
    """On the book's first 4,000 bytes, whose counts take no time."""
    whole = samples.sample_source("book")
    monkeypatch.setattr(
        samples, "sample_source", lambda _: BytesSource([whole.documents[0][:4000]], whole.names)
    )
    monkeypatch.setattr("jaxblt.data.config.sample_source", samples.sample_source)

    def model(name, step, bits):
        recipe = SimpleNamespace(data=get("english_book").data, name=name)
        return SimpleNamespace(
            recipe=recipe, step=step, evaluate=lambda split, *, data: {"bits_per_byte": bits}
        )

    demo._compare(model("book", 24, 1.25), model("english_patches", 9176, 1.75))
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[3:]]
    assert rows[:2] == [["after 24 steps on it", "1.250"], ["english_patches, before", "1.750"]]
    assert [name for name, _ in rows[2:5]] == ["order-5 byte model", "gzip", "bzip2"]
