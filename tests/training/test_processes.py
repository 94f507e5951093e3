"""Runs in processes of their own: killed and started again, and two processes as one."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblt.training.loop import fit
from jaxblt.training.stored.folder import FolderInUse, claimed
from tests.training.test_loop import logged, losses
from tests.training.tiny import Letters, TinyConfig, patched_recipe, split_recipe, tiny_recipe

ROOT = Path(__file__).parents[2]


def start(compiled=None, **options):
    """With a folder for compiled programs, processes that come one after another compile them once."""
    command = [sys.executable, "-m", "tests.training.worker", json.dumps(options)]
    env = dict(os.environ)
    if compiled is not None:
        env |= {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **streams)


def finish(process):
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def fit_in(count, run_dir, steps):
    """Fits in `count` processes; one is this process, which has imported all that another would import first."""
    if count > 1:
        together(count, run_dir=str(run_dir), steps=steps)
    else:
        recipe, one = split_recipe(steps), jax.devices()[:1]
        fit(recipe, run_dir, source=Letters(), devices=one, resume_with=True)


def together(count, **options):
    """Fits in `count` processes that are one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [start(**options, processes=count, port=port, process=i) for i in range(count)]
    for code, said in [finish(worker) for worker in workers]:
        assert code == 0, said


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_killed_and_then_stopped_logs_the_same_bits_when_it_goes_on(compiled, tmp_path):
    """Nor can another trainer use its folder meanwhile, or a second signal keep it from saving."""
    code, said = finish(start(compiled, run_dir=str(tmp_path / "whole")))
    assert code == 0, said
    # rows are read ahead: the kill falls somewhere behind the first checkpoint, step 5, and before the end
    kill_at = random.randrange(8 * 12, 8 * 22)
    killed = tmp_path / "killed"
    code, said = finish(start(compiled, run_dir=str(killed), kill_at=kill_at))
    assert code == -9, said
    before = losses(killed)
    assert max(before, default=0) < 24
    stopped = start(compiled, run_dir=str(killed))
    # the report's last line: from here on signals are caught, and the first step is yet to be compiled
    assert any(line.startswith("total ") for line in stopped.stdout)
    with (
        pytest.raises(FolderInUse, match=f"is in use: process {stopped.pid} on"),
        claimed(killed, is_main=True),
    ):
        pass
    stopped.send_signal(signal.SIGINT)
    time.sleep(0.2)
    stopped.send_signal(signal.SIGTERM)
    code, said = finish(stopped)
    assert (code, "stopped and saved at step" in said) == (0, True), said
    code, said = finish(start(compiled, run_dir=str(killed)))
    assert code == 0, said
    assert logged(killed) == logged(tmp_path / "whole"), f"killed at read {kill_at}"


@pytest.mark.slow(days=28, group="whole runs")
def test_two_processes_have_the_loss_of_one(tmp_path):
    """With patches, whose threshold they have to agree on."""
    entropy_run = str(tmp_path / "entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), steps=12, eval_every=0), entropy_run, source=Letters())
    together(2, run_dir=str(tmp_path / "two"), devices=2, entropy_run=entropy_run)
    fit(patched_recipe(entropy_run), tmp_path / "one", source=Letters(), devices=jax.devices()[:4])
    expected, found = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert [sorted(line) for line in found] == [sorted(line) for line in expected]
    for one, two in zip(expected, found, strict=True):
        for name in one:
            np.testing.assert_allclose(
                two[name], one[name], rtol=1e-3, err_msg=f"{name} at step {one['step']}"
            )


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_goes_on_in_another_number_of_processes(tmp_path):
    """Parameters are split over four processes' devices; a checkpoint of four restores in one, and of one in four."""
    fit_in(1, tmp_path / "alone", steps=24)
    for name, counts in {"fewer": (4, 1), "more": (1, 4)}.items():
        for steps, count in zip((12, 24), counts, strict=True):
            fit_in(count, tmp_path / name, steps)
        found, expected = losses(tmp_path / name), losses(tmp_path / "alone")
        assert found.keys() == expected.keys()
        for step, loss in expected.items():
            assert found[step] == pytest.approx(loss, rel=1e-3), f"{name} at step {step}"
