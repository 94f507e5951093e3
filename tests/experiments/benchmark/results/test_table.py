"""Tables as data: which rows stand, how cells are written, and names that need a legend."""

from typing import Any

import pytest

from experiments.benchmark.results.numbers import ms, rounded, spread, write
from experiments.benchmark.results.paths import look_up, rows
from experiments.benchmark.results.table import markdown, render


def file(**figures: Any) -> dict[str, Any]:
    return figures | {"device": "NVIDIA H200", "jax": "0.11.2", "commit": "0" * 12}


def shown(template: str, **files: Any) -> list[str]:
    return render(template, {name: file(**figures) for name, figures in files.items()}).splitlines()


def test_paths_lead_into_lists_and_mappings() -> None:
    figures = {"dim": 8, "blocks": {"A": [{"tokens": 4, "ms": 1.0}, {"tokens": 8, "ms": 2.0}], "D": []}}
    found = rows(figures, "blocks.{mixer}")
    assert [(row["mixer"], row["tokens"], row["dim"]) for row in found] == [("A", 4, 8), ("A", 8, 8)]
    (row,) = rows({"parameters": {"A": 3}, **figures}, "parameters.{mixer}")
    assert row["value"] == 3
    assert look_up(row, "blocks.{mixer}[tokens=8].ms") == 2.0
    assert look_up(row, "blocks.{mixer}[0].tokens") == 4
    assert look_up(row, "blocks.{mixer}[tokens=9].ms") is None
    assert look_up(row, "no.such.path") is None
    assert look_up(row, '"a text"') == "a text"
    assert look_up({"forward": {"ms": 1}, "forward_backward": {"ms": 3}}, "*.ms") == [1, 3]


def test_of_files_that_repeat_a_row_the_last_is_shown() -> None:
    old = {"shapes": {"8k": {"ms": 3.0}, "16k": {"ms": 4.0}}}
    new = {"shapes": {"8k": {"ms": 2.0}}}
    template = "## T\n\n```rows old new; items = shapes.{shape}; by = shape\nshape = shape; ms = ms|3; file = file\n```"
    assert shown(template, new=new, old=old)[-2:] == ["| 8k | 2 | new |", "| 16k | 4 | old |"]


def test_seeds_are_one_row_with_their_mean() -> None:
    runs = [{"model": "a", "seed": seed, "right": 0.5 + seed / 4} for seed in (0, 1)]
    columns = "model = model; seeds = seed|count; right = right|mean %\n```"
    both = f"## T\n\n```rows f*; items = runs; by = model; together = all\n{columns}"
    files = {"f0": {"runs": runs[:1]}, "f1": {"runs": runs[1:]}}
    assert shown(both, **files)[-1] == "| a | 2 | 62 % (50 % to 75 %) |"
    last = both.replace("together = all", "together = file")
    assert shown(last, **files)[-1] == "| a | 1 | 75 % |"


def test_blocks_are_one_table_with_all_their_columns() -> None:
    template = (
        "## T\n\nWidth {{f.dim|,}}.\n\n```columns two\nn = n; ms = all|spread\n```\n"
        '```rows f; items = a; where = n:2; use = two\n```\n```rows f; items = b; use = two\nof = "b"\n```'
    )
    of = {"seconds": {"median": 0.004, "low": 0.004, "high": 0.004}}
    a, lost = [{"n": 1, "all": of}, {"n": 2, "all": of}], {"n": 3, "all": {"out_of_memory": "too large"}}
    assert shown(template, f={"dim": 1024, "a": a, "b": [lost]}) == [
        *("## T", "", "Width 1,024.", ""),
        *("| n | ms | of |", "| --- | --- | --- |"),
        *("| 2 | 4 (4 to 4) |  |", "| 3 | out of memory | b |"),
    ]


def test_a_name_without_a_legend_is_an_error() -> None:
    template = "## T\n\n`A` is attention.\n\n```rows f; items = runs\nmixer = mixer|name\n```"
    assert shown(template, f={"runs": [{"mixer": "A"}]})[-1] == "| `A` |"
    with pytest.raises(ValueError, match="the table of f shows 'D': explain it above the table"):
        shown(template, f={"runs": [{"mixer": "D"}]})


def test_numbers_have_three_digits() -> None:
    assert [rounded(x) for x in (0, 0.12345, 9.996, 1234.5, 12345)] == ["0", "0.123", "10", "1,230", "12,300"]
    assert ms(0.00041) == "0.41"
    assert spread({"median": 0.002, "low": 0.001, "high": 0.003}) == "2 (1 to 3)"
    assert spread({"median": 0.002, "least": 0.001, "most": 0.004}) == "2 (1 to 4)"
    assert write([0.1, None], "%") == "10 % / "
    assert write([None, None], "%") == write(None) == ""
    assert write("not timed: CUDA out of memory. Tried", "3") == "not timed"


def test_a_row_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 cells and the head 2"):
        markdown(("a", "b"), [("1",)])


def test_of_calls_that_repeat_the_median_is_shown_and_not_the_second() -> None:
    sides = {side: {"bytes_per_second": [1240, 1283, 1263]} for side in ("engine", "generate")}
    lines = shown(
        "```rows a; items = rows\nrate = @bytes_a_second.once.generate|,.0f\n```",
        a={"rows": [dict.fromkeys(("once", "waves"), sides)]},
    )
    assert lines[-1] == "| 1,263 |"
