"""Fields of JSON lines: exact UTF-8, and errors that name the line."""

import gzip
import json

import pytest

from jaxblt.data import JsonlSource, read_document

TEXTS = ["plain", "", "line\nbreak \u2028 and \r", "\u0000 nul, \u00e9, \u4eba, \U0001f9ec", "x" * 1000]


def lines(field="text", **options):
    return [json.dumps({"id": 1, field: text}, **options) for text in TEXTS]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_texts_come_back_exactly(tmp_path, name, ascii_only):
    data = ("\n\n".join(lines(ensure_ascii=ascii_only)) + "\n  \n").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    source = JsonlSource(tmp_path / name)
    assert [read_document(source, i).decode() for i in range(len(source))] == TEXTS
    assert source.read(3, 4, 9) == TEXTS[3].encode()[4:9]
    assert [n.rsplit(":")[-1] for n in source.names] == ["1", "3", "5", "7", "9"]


def test_another_field_and_several_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines("body")))
    source = JsonlSource([tmp_path / "b.jsonl", tmp_path / "a.jsonl"], field="body")
    assert len(source) == 2 * len(TEXTS)
    assert source.names[0].endswith("b.jsonl:1")
    assert source.names[5].endswith("a.jsonl:1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"x.jsonl:2 is not UTF-8: byte 0xe9 at column 13; re-encode it"),
        (b'{"text": ', r"x.jsonl:2 is not JSON"),
        (b'["text"]', r"x.jsonl:2 holds a list; expected an object"),
        (b'{"body": "b", "at": 1}', r"x.jsonl:2 has no field 'text'; its fields are \['at', 'body'\]"),
        (b'{"text": 7}', r"x.jsonl:2: field 'text' holds a int; expected a string"),
        (b'{"text": "\\ud800"}', r"x.jsonl:2: field 'text' holds a lone surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        JsonlSource(tmp_path / "x.jsonl")
