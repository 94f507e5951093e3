"""The sample launchers start what they say, with variables that the library understands."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxblt.parallel.launch import Launch, find_launch

LAUNCH = Path(__file__).resolve().parents[2] / "experiments" / "launch"


@pytest.mark.parametrize("index", [0, 1])
def test_pods_of_the_job_set_find_each_other(index: int) -> None:
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    (job,) = job_set["spec"]["replicatedJobs"]
    workers = job["template"]["spec"]
    (container,) = workers["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    assert workers["completionMode"] == "Indexed"
    assert workers["parallelism"] == workers["completions"]
    first = f"{job_set['metadata']['name']}-{job['name']}-0-0.{job_set['metadata']['name']}"
    expected = Launch(f"{first}:8476", workers["completions"], index, None, "Kubernetes")
    assert find_launch(env) == expected
    assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
    assert container["command"][:3] == ["python", "-m", "experiments.train"]


def test_the_batch_script_hands_its_arguments_to_every_task(tmp_path: Path) -> None:
    """With an `srun` that says what it was given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s|" "$SRUN_CPUS_PER_TASK" "$@"\n', encoding="utf-8")
    srun.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "64"}
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "books", "--name", "a b"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    said = "64|--kill-on-bad-exit=1|python|-m|experiments.train|books|--name|a b|"
    assert done.stdout == said
