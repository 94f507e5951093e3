"""The scripts explain themselves; one runs in a process of its own, as people run it."""

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmark import __main__ as benchmarks
from experiments.benchmark.operations import kernels
from jaxblt.cli.parsing import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *(("experiments." + name,) for name in ("train", "plan", "evaluate", "generate", "patch", "demo")),
    *(("experiments.benchmark", name) for name in benchmarks.BENCHMARKS),
)


def python(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=800
    )


def test_kernels_knows_every_benchmark_of_an_op_and_its_shapes():
    assert set(kernels.SHAPES) == {path.parent.name for path in (ROOT / "pallas_kernels").glob("*/bench.py")}
    for op, names in kernels.SHAPES.items():
        bench = importlib.import_module(f"pallas_kernels.{op}.bench")
        assert set(names) <= {case.name for case in getattr(bench, "CASES", bench.SHAPES)}


def exit_status(monkeypatch, script: str, *args: str) -> int:
    """Of `python -m SCRIPT ARGS`, in this process."""
    module = benchmarks if script == "experiments.benchmark" else importlib.import_module(script)
    assert inspect.getsource(module).endswith('if __name__ == "__main__":\n    run(main)\n')
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as stopped:
        run(module.main)
    return stopped.value.code or 0


@pytest.mark.parametrize("script", SCRIPTS, ids=" ".join)
def test_help_explains(script, monkeypatch, capsys):
    assert exit_status(monkeypatch, *script, "--help") == 0
    assert len(capsys.readouterr().out) > 200


def test_every_benchmark_has_its_name(monkeypatch, capsys):
    assert exit_status(monkeypatch, "experiments.benchmark", "--help") == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [words[0] for words in listed if len(words) > 3] == list(benchmarks.BENCHMARKS)


def test_nothing_is_measured_whose_commit_nobody_knows(monkeypatch, capsys):
    monkeypatch.setattr(benchmarks, "git_commit", lambda: {"commit": None})
    monkeypatch.setattr(benchmarks, "find", lambda name: pytest.fail)
    assert exit_status(monkeypatch, "experiments.benchmark", "ring", "--out", "nowhere.json") == 1
    assert "set JAXBLT_COMMIT" in capsys.readouterr().err


@pytest.mark.slow(days=28, group="processes of their own")
@pytest.mark.parametrize("script", SCRIPTS, ids=" ".join)
def test_help_explains_in_a_process_of_its_own(script):
    """Where nothing else has been imported before."""
    done = python("-m", *script, "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) > 200


@pytest.mark.slow(days=28, group="scripts leave their figures")
def test_a_script_in_a_process_of_its_own_reports_its_failure():
    done = python("-m", "experiments.evaluate", "no/such/run")
    assert done.returncode == 1
    assert "holds no run" in done.stderr
    assert "Traceback" not in done.stderr
