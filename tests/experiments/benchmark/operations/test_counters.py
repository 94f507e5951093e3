"""Counters of kernels: what is read of Nsight Compute's table, and what is refused."""

import csv
import io
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from experiments.benchmark.operations import counted_program, counters

METRICS = [counters.NANOSECONDS, *counters.COUNTS.values(), *counters.SHARES.values()]
WAITS = {
    "barrier": 1.5,
    "gmma": 0.25,
    "long_scoreboard": 2.75,
    "wait": 0.5,
    "selected": 9.0,
    "not_selected": 8.0,
}


def table(*kernels: tuple[str, float]) -> list[str]:
    """As `ncu --csv --page raw` writes it, of kernels' names and milliseconds."""
    waits = [f"{counters.STALL}{name}_per_issue_active.ratio" for name in WAITS]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *METRICS, *waits])
    writer.writerow(["", "", "ns", *[""] * (len(METRICS) - 1), *["inst"] * len(waits)])
    for i, (name, taken) in enumerate(kernels):
        counts = ["3,600,000,000", "168", "256", "384", "166,953", *[f"{10 + i}.5" for i in range(7)]]
        writer.writerow([i, name, f"{taken * 1e6:,.0f}", *counts, *WAITS.values()])
    return ["==PROF== Connected", *out.getvalue().splitlines(), "==PROF== Disconnected"]


def test_kernels_are_read_in_their_order_and_short_ones_added_up() -> None:
    found = counters.read_counts(table(("copy", 0.005), ("product", 2.0), ("sum", 1.0)))
    assert found["seconds"] == pytest.approx(3.005e-3)
    assert found["seconds_of_short_kernels"] == pytest.approx(5e-6)
    product, add = found["kernels"]
    assert (product["name"], add["name"]) == ("product", "sum")
    assert product["seconds"] == pytest.approx(2e-3)
    assert {name: product[name] for name in counters.COUNTS} == {
        "bytes_per_second": 3_600_000_000,
        "registers": 168,
        "blocks": 256,
        "threads": 384,
        "shared_bytes": 166_953,
    }
    assert list(product["percent"].values()) == [10.5 + i for i in range(7)]
    assert product["waits"] == {"long_scoreboard": 2.75, "barrier": 1.5, "wait": 0.5}
    with pytest.raises(ValueError, match="no kernel was counted"):
        counters.read_counts(["==PROF== Connected"])
    with pytest.raises(ValueError, match="profiler looked; ==WARNING== No kernels were profiled"):
        counters.read_counts(["==WARNING== No kernels were profiled.", *table()])


def test_programs_before_one_that_fails_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setenv("XLA_FLAGS", "--one")

    def run(command: list[str], *, env: dict[str, str], check: bool) -> Any:
        commands.append(command)
        assert env["XLA_FLAGS"] == f"--one {counters.FLAGS}"
        assert not check
        Path(command[command.index("--log-file") + 1]).write_text(
            "\n".join(["==ERROR== no rights", *table(("product", 1.0))])
        )
        return SimpleNamespace(returncode=len(commands) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    out = tmp_path / "counters.json"
    with pytest.raises(RuntimeError, match=r"a:b:c:forward ended with 1 under ncu.*; ==ERROR== no rights"):
        counters.counters(("x:y:z:forward", "a:b:c:forward"), str(out))
    assert [command[-1] for command in commands] == ["x:y:z:forward", "a:b:c:forward"]
    written = json.loads(out.read_text())
    assert list(written["programs"]) == ["x:y:z:forward"]
    assert written["environment"]["XLA_FLAGS"] == f"--one {counters.FLAGS}"
    out.write_text("of before")
    with pytest.raises(RuntimeError, match="a:b:c:forward ended with 2"):
        counters.counters(("a:b:c:forward",), str(out))
    assert out.read_text() == "of before"


def test_bad_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is nothing to count"):
        counters.counters((), "out.json")
    with pytest.raises(ValueError, match="'long_conv' is no program: it takes OP:SHAPE:VERSION:PASS"):
        counters.counters(("long_conv",), "out.json")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="ncu not found: install NVIDIA Nsight Compute"):
        counters.counters(("short_conv:books:xla:forward",), "out.json")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("conv:books:xla:forward", "unknown op 'conv', choose among attention, blocked_conv"),
        ("short_conv:book:xla:forward", "short_conv has no shape 'book', choose among hyena_d768_8k"),
        ("short_conv:books:xla:backward", "unknown pass 'backward', choose among forward, forward.backward"),
        (
            "short_conv:evo2_7b_decode:cuda:forward",
            "short_conv has no version 'cuda' of evo2_7b_decode on cpu",
        ),
    ],
)
def test_a_program_names_what_a_benchmark_has(program: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        counted_program.case_of(*program.split(":"))


def test_what_is_counted_runs_once_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: seen.append("start"), cudaProfilerStop=lambda: seen.append("stop")
    )
    monkeypatch.setattr(counted_program, "cuda_runtime", lambda: runtime)
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda out: seen.append(len(ready(out))))
    counted_program.main("short_conv:evo2_7b_decode:xla:forward+backward")
    first, *rest = seen
    assert rest == ["start", first, "stop"]
    runtime.cudaProfilerStart = lambda: 100
    with pytest.raises(RuntimeError, match="cudaProfilerStart returned 100"):
        counted_program.main("short_conv:evo2_7b_decode:xla:forward+backward")
