"""Sections of docs/results.md on blocks by length and on longer contexts."""

from typing import Any

from experiments.benchmark import _length_tables, _tables


def test_blocks_by_length_have_times_exponents_and_crossings() -> None:
    passes = {"forward": {"median": 1e-3, "tokens_per_second": 2e6, "mfu": 0.4}}
    passes["forward+backward"] = {"median": 4e-3, "tokens_per_second": 5e5, "mfu": 0.3}
    planned = {"arguments": 10**9, "temporaries": 5 * 10**8, "results": 0}
    at: dict[str, Any] = {"tokens": 2048, **passes}
    at |= {"planned_bytes": planned, "planned_bytes_with_remat": {"arguments": 10**9}}
    bare = {key: value for key, value in at.items() if key != "planned_bytes_with_remat"}
    fit, cross = {"value": 1.0, "low": 0.9, "high": 1.1}, {"value": 3000.0, "low": 2000.0, "high": None}
    found = {
        "benchmark": "scaling",
        "dim": 1024,
        "rows": 1,
        "parameters": {"D": 12, "A": 10},
        "blocks": {"D": [at], "A": [at, at | {"tokens": 4096, "forward+backward": None}]},
        "growth": {"D": {"forward": fit, "forward+backward": None}, "A": dict.fromkeys(passes)},
        "crossover": {"D": {"forward": cross, "forward+backward": dict.fromkeys(("value", "low", "high"))}},
    }
    lines = _length_tables.blocks({"scaling": found}).splitlines()
    assert "| `D` | 2,048 | 1 | 4 | 0.5 | 2 | 40 % | 30 % | 1.5 GB | 1.0 GB |" in lines
    assert "| `A` | 4,096 | 1 | does not fit | 0.5 |  | 40 % |  | 1.5 GB | 1.0 GB |" in lines
    assert "| `D` | 12 | 1.00 (0.90 to 1.10) |  | 3,000 (2,000 to never) | never |" in lines
    assert "| `A` | 10 |  |  |  |  |" in lines
    found["crossover"]["D"]["forward"] = dict.fromkeys(("value", "low", "high"), 2048.0)
    assert "| at most 2,048 | never |" in _length_tables.blocks({"scaling": found})
    found["crossover"]["D"]["forward"] |= {"high": 3000.0}
    assert "| 2,048 (2,048 to 3,000) | never |" in _length_tables.blocks({"scaling": found})
    assert "width 1,024, bf16." in lines[0]
    assert _length_tables.blocks({}) == ""
    edges = {"parameters": {"T64_edges": 9}, "blocks": {"T64_edges": [bare]}, "crossover": {}}
    edges |= {"dtype": "float32", "growth": {"T64_edges": dict.fromkeys(passes)}}
    text = _length_tables.blocks({"scaling": found | edges})
    assert "| `T64_edges` | 2,048 | 1 | 4 | 0.5 | 2 | 40 % | 30 % | 1.5 GB |  |" in text.splitlines()
    assert "width 1,024, fp32. `T32` to `T256` are state engines" in text
    assert "with `_edges`" in text.replace("\n", " ")


def test_a_hyena_layer_has_times_and_shares_of_its_parts() -> None:
    part = {"forward": {"median": 1e-3, "share": 0.5}, "forward+backward": {"median": 4e-3, "share": 0.25}}
    parts = dict.fromkeys(("layer", "mixer", "convolution", "mlp"), part)
    layer = {"filter": "modal", "rows": 64, "length": 8192, "parts": parts}
    found = {"benchmark": "hyena_layer", "dim": 768, "devices": {"kind": "one GPU"}, "layers": [layer]}
    text, cell = _length_tables.hyena_layers({"hyena_layer": found}), "1 / 4 (50 % / 25 %)"
    assert f"| 8,192 | 64 | modal | {cell} | {cell} | {cell} |  | {cell} |" in text
    assert "one GPU" in text
    assert _length_tables.hyena_layers({}) == ""


def test_contexts_of_every_run_have_their_gain() -> None:
    one = {"value": 2.0, "low": 1.9, "high": 2.1}
    gain = {"value": 0.02, "low": 0.01, "high": 0.03}
    run = {"run": "pulse", "step": 3, "targets": 512}
    run["contexts"] = [{"context": 8192, "bits_per_byte": one, "gain": gain}]
    text = _tables.context({"pulse_context": run, "memory_context": {"contexts": []}})
    assert (
        "| `pulse_context` | `pulse`, step 3 | 8,192 | 2.000 (1.900 to 2.100) | 0.020 (0.010 to 0.030) |"
        in text
    )
    assert len(text.splitlines()) == 3
