"""A `metrics.jsonl` of any content is read, or refused by one line that names the file."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.training.log.runlog import read_metrics

SOUND = json.dumps({"step": 3, "loss": 0.5, "grad_norm": float("nan")}).encode()
part = st.just(SOUND) | st.integers(0, len(SOUND)).map(lambda end: SOUND[:end])
foreign = st.sampled_from([b"3", b"[]", b"null", b'{"loss": 1}', b'{"step": "x"}', b"[" * 5000, b"9" * 5000])
lines = st.lists(part | foreign | st.binary(max_size=5), max_size=4).map(b"\n".join)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "metrics.jsonl"


@settings(max_examples=50)
@given(lines, st.booleans())
def test_any_lines(file, data, ended):
    file.write_bytes(data + b"\n" * ended)
    refusal, found = "", []
    try:
        found = list(read_metrics(file))
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert str(file) in refusal
        assert "\n" not in refusal
    assert all(isinstance(line, dict) for line in found)
