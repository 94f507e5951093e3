"""Runs in processes of their own: killed and started again, and two processes as one."""

import json
import random
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jaxblt.training.loop import fit
from tests.training.test_loop import logged, losses
from tests.training.tiny import Letters, TinyConfig, patched_recipe, tiny_recipe

ROOT = Path(__file__).parents[2]


def start(**options):
    command = [sys.executable, "-m", "tests.training.worker", json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    said, _ = process.communicate(timeout=300)
    return process.returncode, said


def test_a_killed_run_logs_the_same_bits_when_started_again(tmp_path):
    code, said = finish(start(run_dir=str(tmp_path / "whole")))
    assert code == 0, said
    # rows are read ahead: the kill falls somewhere behind the first checkpoint, step 5, and before the end
    kill_at = random.randrange(8 * 12, 8 * 22)
    code, said = finish(start(run_dir=str(tmp_path / "killed"), kill_at=kill_at))
    assert code == -9, said
    before = losses(tmp_path / "killed")
    assert max(before, default=0) < 24
    code, said = finish(start(run_dir=str(tmp_path / "killed")))
    assert code == 0, said
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole"), f"killed at read {kill_at}"


def test_two_processes_have_the_loss_of_one(tmp_path):
    """With patches, whose threshold they have to agree on."""
    entropy_run = str(tmp_path / "entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), steps=12, eval_every=0), entropy_run, source=Letters())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"devices": 2, "processes": 2, "port": port, "entropy_run": entropy_run}
    workers = [start(run_dir=str(tmp_path / "two"), **options, process=i) for i in range(2)]
    for code, said in [finish(worker) for worker in workers]:
        assert code == 0, said
    fit(patched_recipe(entropy_run), tmp_path / "one", source=Letters(), devices=jax.devices()[:4])
    expected, found = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert [sorted(line) for line in found] == [sorted(line) for line in expected]
    for one, two in zip(expected, found, strict=True):
        for name in one:
            np.testing.assert_allclose(
                two[name], one[name], rtol=1e-3, err_msg=f"{name} at step {one['step']}"
            )
