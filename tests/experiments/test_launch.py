"""The sample launchers start what they say, with variables that the library understands."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from jaxblt.cli.train import main
from jaxblt.parallel.launch import Launch, find_launch
from jaxblt.training import loop
from jaxblt.training.recipe import Recipe
from jaxblt.training.stored.resolved import Resolved, read_resolved, write_resolved

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "experiments" / "launch"
CUDA = ("12", "13")


@pytest.mark.parametrize("index", [0, 1])
def test_pods_of_the_job_set_find_each_other(index: int) -> None:
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    (job,) = job_set["spec"]["replicatedJobs"]
    workers = job["template"]["spec"]
    (container,) = workers["template"]["spec"]["containers"]
    assert all(step["env"] == container["env"] for step in workers["template"]["spec"]["initContainers"])
    env = {item["name"]: item["value"] for item in container["env"]}
    env |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    assert workers["completionMode"] == "Indexed"
    assert workers["parallelism"] == workers["completions"]
    first = f"{job_set['metadata']['name']}-{job['name']}-0-0.{job_set['metadata']['name']}"
    expected = Launch(f"{first}:8476", workers["completions"], index, None, "Kubernetes")
    assert find_launch(env) == expected


class StartedError(Exception):
    """Where a dry start ends."""


def test_the_job_set_starts_in_a_copy_of_the_image_s_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first step: data are read, the entropy model is there, rows divide among the GPUs of all hosts."""
    for _, rest in (step for step in instructions("13") if step[0] == "COPY"):
        *sources, folder = rest.split()
        for source in sources:
            (tmp_path / folder / Path(source).name if folder == "./" else tmp_path / folder).symlink_to(
                ROOT / source
            )
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    workers = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = workers["template"]["spec"]
    for mount in container()["volumeMounts"]:
        if mount["mountPath"].startswith(container()["workingDir"]):
            (tmp_path / os.path.relpath(mount["mountPath"], container()["workingDir"])).mkdir()
    devices = workers["parallelism"] * container()["resources"]["limits"]["nvidia.com/gpu"]

    def begin(recipe: Recipe, run_dir: Path, *args: object, **options: object) -> None:
        assert recipe.data.batch_size % devices == 0
        if recipe.entropy_run is not None:
            read_resolved(recipe.entropy_run)
        write_resolved(run_dir, Resolved(recipe, {}))
        raise StartedError

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "begin_run", begin)
    fetch, *steps = [*pod["initContainers"], *pod["containers"]]
    assert "jaxblt data fetch books" in fetch["command"][-1]
    for part in ("train", "validation", "test"):
        file = tmp_path / f"data/books/{part}/a.txt"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"words " * 20_000)
    for step in steps:
        assert step["command"][:3] == ["python", "-m", "experiments.train"]
        assert (tmp_path / "experiments/train.py").exists()
        with pytest.raises(StartedError):
            main(step["command"][3:])


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


def instructions(version: str) -> list[tuple[str, str]]:
    """What a Dockerfile does, line by line: (instruction, arguments)."""
    lines = (LAUNCH / f"Dockerfile.cuda{version}").read_text(encoding="utf-8").splitlines()
    done = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in done]


def container() -> dict:
    """Of the job set."""
    job_set = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    (job,) = job_set["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("version", CUDA)
def test_an_image_holds_what_the_package_is_built_of(version: str) -> None:
    """Nothing is built here: what a Dockerfile copies and installs is read."""
    done = instructions(version)
    assert done[0] == ("FROM", "python:3.12-slim")
    first, last = (i for i, (name, rest) in enumerate(done) if name == "RUN")
    # Nothing else: a change of a source would install gigabytes anew
    assert [rest for name, rest in done[:first] if name == "COPY"] == ["pyproject.toml constraints.txt ./"]
    copied = [word for name, rest in done[:last] if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    needed |= {os.path.relpath((ROOT / "jaxblt" / "recipes").resolve(), ROOT), "constraints.txt"}
    assert needed <= set(copied)
    assert (
        f'pip install --no-cache-dir -c constraints.txt ".[cuda{version},jla]" && rm -rf build'
        in done[first][1]
    )
    assert done[last][1] == "pip install --no-cache-dir --no-deps --force-reinstall ."
    extras = project["project"]["optional-dependencies"]
    assert any(requirement.startswith(f"jax[cuda{version}]") for requirement in extras[f"cuda{version}"])
    assert extras["jla"]


@pytest.mark.parametrize("version", CUDA)
def test_an_image_is_called_what_its_command_and_the_job_set_say(version: str) -> None:
    file = LAUNCH / f"Dockerfile.cuda{version}"
    (said,) = re.findall(
        r"docker build -f (\S+) -t (\S+) \.$", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert said == (str(file.relative_to(ROOT)), f"jaxblt:cuda{version}")
    pod = container()
    named = pod["image"].partition(":cuda")
    assert named[0] == "jaxblt"
    assert named[2] in CUDA
    assert ("WORKDIR", pod["workingDir"]) in instructions(version)
    slurm = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    assert all((ROOT / name).is_file() for name in re.findall(r"experiments/launch/\S+\.cuda\d+", slurm))
