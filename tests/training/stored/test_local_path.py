"""Folders whose names other tools take for patterns, and users without a name."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblt.training.stored.checkpoint import CheckpointCorrupt, Checkpointer, list_steps, restore
from jaxblt.training.stored.integrity import FILE_LIST
from jaxblt.training.stored.local_path import LocalPath, to_local_path

STATE = {"w": np.arange(5, dtype=np.float32)}
ABSTRACT = {"w": jax.ShapeDtypeStruct((5,), np.float32)}


@pytest.mark.parametrize("name", ["[a]", "*"])
def test_names_of_folders_are_no_patterns(name: str, tmp_path: Path) -> None:
    """Steps are read back, and each damaged one is set aside under a name of its own."""
    (tmp_path / "a" / "2.aside").mkdir(parents=True)
    for _ in range(2):
        with Checkpointer(tmp_path / name) as checkpoints:
            if not checkpoints.steps():
                checkpoints.save(1, STATE)
            checkpoints.save(2, STATE)
            checkpoints.wait()
            (tmp_path / name / "2" / "meta" / "data.json").write_text("{")
            assert checkpoints.restore(ABSTRACT).step == 1
    assert {"1", "2.aside", "2.aside1"} == {path.name for path in (tmp_path / name).iterdir()}


def test_folders_that_orbax_would_look_for_elsewhere_are_refused() -> None:
    for name in ("/runs/a\\b", "/runs/\udcff"):
        with pytest.raises(
            ValueError, match="cannot hold checkpoints: rename it to UTF-8 without backslashes"
        ):
            Checkpointer(name)
    with pytest.raises(ValueError, match="'/s3/run' would be taken for a URL: mount /s3 under another name"):
        list_steps("/s3/run")
    assert to_local_path("runs/a").is_absolute()


def test_a_step_without_the_time_of_its_save_belongs_to_a_user_without_a_name(
    nameless: None, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text(json.dumps({}))
    (tmp_path / "1" / FILE_LIST).unlink()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, STATE)
    assert restore(tmp_path, ABSTRACT, step=1).step == 1


def test_a_step_that_nobody_could_read_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when what one process wrote is not found, and never merged."""
    monkeypatch.setattr(LocalPath, "glob", lambda self, pattern: iter(()))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.check()
        for step, notice in ((1, lambda: check_until_told(checkpoints)), (2, checkpoints.wait)):
            checkpoints.save(step, STATE)
            told = rf"step {step} was saved in .*, and cannot be read: .*; use another folder"
            with pytest.raises(CheckpointCorrupt, match=told):
                notice()


def check_until_told(checkpoints: Checkpointer) -> None:
    while True:
        checkpoints.check()
