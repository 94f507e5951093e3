"""docs/results.md and README's table are what the record says."""

from pathlib import Path

import pytest

from experiments.benchmark import _split_tables as split_tables
from experiments.benchmark import _tables as tables
from experiments.benchmark import results
from experiments.benchmark._markdown import ms, origins, read_folder, rounded, spread, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_and_the_table_are_what_the_record_says() -> None:
    folder = read_folder(ROOT / results.RECORD)
    again = "run `python -m experiments.benchmark results`"
    assert (ROOT / results.PAGE).read_text(encoding="utf-8") == results.page(folder), again
    readme = (ROOT / results.README).read_text(encoding="utf-8")
    assert readme == results.with_table(readme, folder), again


def test_every_file_says_where_it_was_measured() -> None:
    for name, found in read_folder(ROOT / results.RECORD).items():
        for device, jax, commit in origins(found):
            assert device, name
            assert jax[0].isdigit(), name
            assert len(commit.removesuffix("-dirty")) == 12, name


def test_every_benchmark_of_an_operation_is_shown() -> None:
    folder = read_folder(ROOT / results.RECORD)
    shown = tables.operations(folder)
    timed = [name for name, found in folder.items() if "op" in found and "shapes" in found]
    assert "long_conv" in timed
    assert not [name for name in timed if f"### `{name}`" not in shown]


def test_a_file_that_does_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="it needs all three"):
        origins({"devices": {"kind": "NVIDIA H200", "platform": "gpu"}, "versions": {"jax": "0.11.2"}})


def test_a_changed_figure_changes_the_page() -> None:
    folder = read_folder(ROOT / results.RECORD)
    before = results.page(folder)
    folder["books"]["evaluation"]["bits_per_byte"] = 1.5
    assert results.page(folder) != before
    assert "| 1.500 |" in results.page(folder)
    assert "1.500 bits per byte" in results.summary(folder)


def test_figures_of_now_and_what_does_not_run_are_shown() -> None:
    folder = read_folder(ROOT / results.RECORD)
    side = {"ms": {"first": 1.5, "second": 3.0}, "ratio": {"value": 0.5}}
    shape = {"tokens": 64, "keys": 32, "heads": 4, "head_dim": 8, "causal": True, "accumulate": False}
    folder["attention_parts"] = {
        "first": "mosaic_gpu",
        "second": "xla",
        "calls": [shape | {"forward": side}],
    }
    assert (
        "| forward 64x32, 4 heads of 8, causal=True accumulate=False | 1.5 | 3 | 0.500 |"
        in tables.attention_parts(folder)
    )
    lost = {"out_of_memory": "too large"}
    folder["sequence_parallel_new"] = {
        "steps": [{"bytes": 4096, "devices": 2, "all": lost}],
        "layers": [
            {
                "filter": "modal",
                "dim": 8,
                "tokens": 64,
                "devices": 2,
                "all": lost,
                "one": lost,
                "speed_up": None,
            }
        ],
    }
    assert "| train step | 4,096 | 2 | out of memory |" in split_tables.steps(folder)
    assert "| 64 | 2 | out of memory | out of memory |  |" in split_tables.layers(folder)
    assert split_tables.ops({"sequence_parallel_new": folder["sequence_parallel_new"]}) == ""
    of = {"seconds": {"median": 0.004, "low": 0.004, "high": 0.004}}
    op = {"op": "delta", "tokens": 64, "heads": 2, "devices": 2, "one": of, "all": of, "share_of_ideal": 0.5}
    folder["sequence_parallel_ops"] = {"ops": [op]}
    assert "| `gated_delta_rule` | 64 | 2 | 2 | 4 (4 to 4) | 4 (4 to 4) | 50 % |" in split_tables.ops(folder)
    folder["exchange_new"] = {
        "devices_in_ring": 2,
        "exchanges": [{"setting": "peer", "mib": 1, "failed": "no"}],
    }
    assert "| `exchange_new` | 2 | peer | 1 | failed |  |" in split_tables.exchanges(folder)


def test_a_readme_without_a_place_for_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="put both where the table belongs"):
        results.with_table("# jaxblt", {})


def test_numbers_have_three_digits() -> None:
    assert [rounded(x) for x in (0, 0.12345, 9.996, 1234.5, 12345)] == ["0", "0.123", "10", "1,230", "12,300"]
    assert ms(0.00041) == "0.41"
    assert spread({"median": 0.002, "low": 0.001, "high": 0.003}) == "2 (1 to 3)"
    assert spread({"median": 0.002, "least": 0.001, "most": 0.004}) == "2 (1 to 4)"


def test_a_row_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 cells and the head 2"):
        table(("a", "b"), [("1",)])
