"""Checkpoints that are a link: read and trained by one rule, which other people's links do not pass."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxblt.training.log.trackers import JsonlTracker
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.folder import LOCK, FolderInUse, claimed
from jaxblt.training.stored.links import ID_FILE, check_stored, sign_links
from jaxblt.training.stored.resolved import checkpoint_dir
from jaxblt.training.stored.safe_files import UnsafeFile, replace_text

NOT_ITS_OWN = (
    r"checkpoints leads out of .*, to .*scratch, which is somebody else's and does not say that it is this"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose checkpoints lie on another disk, which is empty."""
    (tmp_path / "run").mkdir()
    (tmp_path / "scratch").mkdir()
    checkpoint_dir(tmp_path / "run").symlink_to(tmp_path / "scratch")
    return tmp_path / "run"


@pytest.fixture
def as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing belongs to the user."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def save(run_dir: Path) -> None:
    with Checkpointer(checkpoint_dir(run_dir)) as checkpoints:
        checkpoints.save(1, {"w": np.zeros(2, np.float32)})


def claim(run_dir: Path) -> None:
    with claimed(run_dir, is_main=True):
        pass


def test_a_run_that_was_trained_through_a_link_is_read_through_it(run_dir: Path, as_another: None) -> None:
    with claimed(run_dir, is_main=True):
        sign_links(run_dir)
        save(run_dir)
        copy = run_dir.rename(run_dir.parent / "copy")
        (copy / LOCK).unlink()  # it would have one of its own
        with pytest.raises(FolderInUse, match="scratch is in use"):
            claim(copy)
    assert check_stored(copy) == [run_dir.parent / "scratch"]
    assert len((copy / ID_FILE).read_text()) > 30
    (copy / ID_FILE).write_text("of another")
    for check in (claim, check_stored):
        with pytest.raises(UnsafeFile, match=NOT_ITS_OWN):
            check(copy)


def test_links_of_the_user_are_followed_and_those_of_others_are_not(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing says whose the checkpoints are: somebody moved them, or an earlier version trained."""
    save(run_dir)
    for check in (claim, check_stored):
        check(run_dir)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    before = sorted(run_dir.parent.rglob("*"))
    for check in (claim, check_stored):
        with pytest.raises(UnsafeFile, match=NOT_ITS_OWN):
            check(run_dir)
    assert sorted(run_dir.parent.rglob("*")) == before
    for folder in (run_dir, run_dir.parent / "scratch"):
        (folder / ID_FILE).write_text("mine")
    for check in (claim, check_stored):
        check(run_dir)


def test_what_cannot_be_read_is_not_trained_either(run_dir: Path) -> None:
    scratch = run_dir.parent / "scratch"
    (scratch / "1").symlink_to(run_dir.parent)
    for check in (claim, check_stored):
        with pytest.raises(UnsafeFile, match="leads out of"):
            check(run_dir)
    (scratch / "1").unlink()
    scratch.rmdir()
    for check in (claim, check_stored):
        with pytest.raises(UnsafeFile, match="scratch, which is no folder: make it first"):
            check(run_dir)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    victim.write_text('{"step": 1}\n')
    (run_dir / "empty").touch()
    links = [(LOCK, victim, claim), ("metrics.jsonl", victim, JsonlTracker)]
    for name, target, write in [*links, ("metrics.jsonl", run_dir / "empty", JsonlTracker)]:
        (run_dir / name).symlink_to(target)
        with pytest.raises(UnsafeFile, match=f"{name} (is a link, and nothing is written|leads out of)"):
            write(run_dir)
        (run_dir / name).unlink()
    for name in ("config.partial", "config.json"):
        (run_dir / name).symlink_to(victim)
        replace_text(run_dir / "config.json", "{}")
        assert set(os.listdir(run_dir)) == {"config.json", "empty"}
        assert not (run_dir / "config.json").is_symlink()
        (run_dir / "config.json").unlink()
    assert victim.read_text() == '{"step": 1}\n'
