"""These tests write a byte model and a byte-patched one, neither of them trained, to files and read them back."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxblt.interchange import make_embed_program, make_score_program, read_run, write_program, write_run
from jaxblt.models import ByteLMConfig, StackConfig
from tests.answers.runs import HEADS, SEQ_LEN, make_run, patched_run
from tests.compiled import compiled_once_and_quickly
from tests.interchange.clean import NAMES
from tests.mixer_table import table

ROOT = Path(__file__).resolve().parents[2]
SMALL = ByteLMConfig(
    stack=StackConfig(dim=16, num_layers=2, pattern="A", mlp_dim=24, mixers=table(attention=HEADS))
)


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(compiled: str) -> Iterator[None]:
    with compiled_once_and_quickly(compiled):
        yield


@pytest.fixture(scope="package")
def runs():
    """A byte language model, and a byte-patched model that an entropy model cuts for."""
    return {"bytes": replace(make_run(SMALL), step=7), "patches": patched_run()}


@pytest.fixture(scope="package")
def files(runs, tmp_path_factory) -> Path:
    """A folder with a file of each run and what was read back of it."""
    folder = tmp_path_factory.mktemp("files")
    for name in NAMES:
        write_run(runs[name], folder / f"{name}.safetensors")
        read_run(folder / f"{name}.safetensors", folder / name)
    return folder


@pytest.fixture(scope="package")
def programs(runs, files) -> Path:
    """That folder, with two programs of the byte model."""
    write_program(make_score_program(runs["bytes"], SEQ_LEN), files / "score.bin")
    write_program(make_embed_program(runs["bytes"], SEQ_LEN), files / "embed.bin")
    return files


def ask_clean_process(folder: Path, *names: str) -> dict[str, np.ndarray]:
    """What a process that knows the folder alone finds in these runs and programs."""
    command = [sys.executable, "-m", "tests.interchange.clean", folder, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(folder / "found.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="package")
def found(programs) -> dict[str, np.ndarray]:
    """Logits of the byte model, and answers of its programs."""
    return ask_clean_process(programs, "bytes", "score.bin", "embed.bin")
