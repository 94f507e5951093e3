"""Tables as text and as Markdown."""

import pytest

from jaxblt.text_table import format_table

HEADERS = ["model", "bytes", "bits per byte"]
ROWS = [["bzip2", 4737688, 2.15834], ["BLT-Hyena", 12, None]]


def test_text() -> None:
    assert format_table(HEADERS, ROWS) == (
        "model          bytes  bits per byte\n"
        "---------  ---------  -------------\n"
        "bzip2      4,737,688          2.158\n"
        "BLT-Hyena         12              -"
    )


def test_markdown() -> None:
    assert format_table(HEADERS, ROWS, style="markdown", digits=1) == (
        "| model     |     bytes | bits per byte |\n"
        "|-----------|----------:|--------------:|\n"
        "| bzip2     | 4,737,688 |           2.2 |\n"
        "| BLT-Hyena |        12 |             - |"
    )


def test_no_rows_and_rows_of_another_length() -> None:
    assert format_table(["a", "b"], []) == "a  b\n-  -"
    with pytest.raises(ValueError, match="a row of 1 cells under 2 headers"):
        format_table(["a", "b"], [["x"]])
