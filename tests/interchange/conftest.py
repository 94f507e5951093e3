"""These tests write a byte model and a byte-patched one, neither of them trained, to files and read them back."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxblt.interchange import make_embed_program, make_score_program, read_run, write_program, write_run
from tests.answers.runs import BYTES, SEQ_LEN, make_run, patched_run
from tests.compiled import compiled_once_and_quickly
from tests.interchange.clean import NAMES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="package")
def _compiled_once_and_quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once_and_quickly(str(tmp_path_factory.mktemp("compiled"))):
        yield


@pytest.fixture(scope="package")
def runs():
    """A byte language model of Hyena and attention, and a byte-patched model that an entropy model cuts for."""
    return {"bytes": make_run(BYTES), "patches": patched_run()}


@pytest.fixture(scope="package")
def files(runs, tmp_path_factory) -> Path:
    """A folder with a file of each run, what was read back of it, and two programs."""
    folder = tmp_path_factory.mktemp("files")
    for name in NAMES:
        write_run(runs[name], folder / f"{name}.safetensors")
        read_run(folder / f"{name}.safetensors", folder / name)
    write_program(make_score_program(runs["bytes"], SEQ_LEN), folder / "score.bin")
    write_program(make_embed_program(runs["bytes"], SEQ_LEN), folder / "embed.bin")
    return folder


@pytest.fixture(scope="package")
def found(files) -> dict[str, np.ndarray]:
    """What a clean process finds there."""
    command = [sys.executable, "-m", "tests.interchange.clean", files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(files / "found.npz") as stored:
        return dict(stored)
