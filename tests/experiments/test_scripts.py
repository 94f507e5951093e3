"""The scripts with wrong arguments and with right ones; in a process of its own, as people run it, what does work."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments._cli import run
from experiments.benchmark import kernels
from tests import conftest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = (
    *(
        "record",
        "baselines",
        "context",
        "cpu_table",
        "patching_share",
        "kernels",
        "ring",
        "packed_ring",
        "exchange",
        "generation",
        "attention_parts",
        "sequence_parallel",
        "sequence_plan",
    ),
    *("draw", "entropy", "stack", "flex_attention"),
)
SCRIPTS = (
    "train",
    "plan",
    "evaluate",
    "generate",
    "patch",
    "demo",
    *(f"benchmark.{name}" for name in BENCHMARKS),
)
EXECUTE = (
    "import nbclient, nbformat; n = nbformat.read('experiments/notebooks/quickstart.ipynb', 4); "
    "nbclient.NotebookClient(n, timeout=600, kernel_name='python3').execute(); "
    "print(sum(len(c.get('outputs', [])) for c in n.cells))"
)


def python(*args: str, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **changes}
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
    module = importlib.import_module(script)
    assert inspect.getsource(module).endswith('if __name__ == "__main__":\n    run(main)\n')
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as stopped:
        run(module.main)
    return stopped.value.code or 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains(script, monkeypatch, capsys):
    assert exit_status(monkeypatch, f"experiments.{script}", "--help") == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_in_a_process_of_its_own(script):
    """Where nothing else has been imported before."""
    done = python("-m", f"experiments.{script}", "--help")
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout) > 200


def test_a_script_in_a_process_of_its_own_reports_its_failure():
    done = python("-m", "experiments.evaluate", "no/such/run")
    assert done.returncode == 1
    assert "holds no run" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_leaves_everything_it_promises_and_goes_on(tmp_path):
    run = tmp_path / "demo"
    args = ("-m", "experiments.demo", "--run-dir", str(run), "--steps", "4", "--entropy-steps", "4")
    # it runs long enough for the emitters that the suite does without
    done = python(*args, XLA_FLAGS=os.environ.get("XLA_FLAGS", "").replace(conftest.OLD_EMITTERS, ""))
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("order-5 byte model", "gzip", "bzip2", "xz", "BLT-Hyena", "bytes a patch"):
        assert name in done.stdout
    assert (run / "patches.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "generated.txt").read_text(encoding="utf-8").startswith("The Time Traveller ")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["versions"]["jax"]
    assert config["recipe"]["patcher"]["threshold"] > 0
    assert list(run.glob("tensorboard/events.out.tfevents.*"))
    assert (run / "checkpoints" / "4").is_dir()
    text = ROOT / "LICENSE"
    patched = python("-m", "experiments.patch", str(text), "--run-dir", str(run), "--length", "300")
    assert patched.returncode == 0, patched.stderr[-2000:]
    assert "bytes a patch" in patched.stdout


def test_the_notebook_runs_from_top_to_bottom():
    done = python("-c", EXECUTE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) >= 6
