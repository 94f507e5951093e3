"""A run's folder: one trainer, no trace of a failed start, one error for a full disk."""

import errno
import os
import re
from pathlib import Path

import pytest

from jaxblt.training.stored.folder import LOCK, FolderInUse, claimed
from tests.training.tiny import Letters, tiny_recipe


def claim(folder: Path, error: Exception | None = None) -> None:
    with claimed(folder, is_main=True):
        if error is not None:
            raise error


def test_a_second_trainer_is_refused_by_name_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claimed(folder, is_main=True):
        with pytest.raises(
            FolderInUse, match=rf"^{folder} is in use: process {os.getpid()} on .*another run"
        ):
            claim(folder)
        assert (folder / LOCK).exists()
        (folder / "config.json").touch()
    claim(folder)
    assert os.listdir(folder) == ["config.json"]


def test_a_lock_file_that_nobody_holds_keeps_nobody_out(tmp_path: Path) -> None:
    """As a process leaves it that was killed."""
    (tmp_path / LOCK).write_text("process 1 on another")
    claim(tmp_path)
    assert os.listdir(tmp_path) == []


def test_processes_beside_the_main_one_claim_nothing(tmp_path: Path) -> None:
    with claimed(tmp_path / "run", is_main=False):
        assert not (tmp_path / "run").exists()


def test_folders_that_stay_empty_go_again(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with pytest.raises(RuntimeError, match="no data"):
        claim(folder, RuntimeError("no data"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        ValueError("RESOURCE_EXHAUSTED: write failed: No space left on device\n at a place\n and another"),
    ],
)
def test_a_full_disk_is_one_line(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"no space left on the disk: free some.*/run'$") as caught:
        claim(tmp_path / "run", error)
    assert caught.value.errno == errno.ENOSPC
    assert "\n" not in str(caught.value)
    with pytest.raises(PermissionError, match="not this one"):
        claim(tmp_path / "run", PermissionError("not this one"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_nobody_may_write_is_named_with_the_fix(
    number: int, tmp_path: Path, monkeypatch
) -> None:
    """The system names the lock, which the user knows nothing of."""

    def refuse(file, *given) -> int:
        raise OSError(number, os.strerror(number), str(file))

    monkeypatch.setattr("jaxblt.training.stored.folder.open_own", refuse)
    said = rf"^run folder '{tmp_path}' cannot be written \({os.strerror(number)}.*--run-dir"
    with pytest.raises(PermissionError, match=said):
        claim(tmp_path)


def test_a_file_in_place_of_a_folder_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/run"):
        with pytest.raises(
            OSError, match=rf"^run folder '{tmp_path}/{name}' cannot be made \(.*\): choose another"
        ):
            claim(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "source", "said"),
    [
        ({"data": {"paths": ("no/such/file.txt",)}}, None, "no/such/file.txt"),
        ({"mesh": {"data": 3}}, Letters(), "multiply to 3, there are 8 devices"),
        ({"mesh": {"data": 8}, "accumulate": 8}, Letters(), "rows"),
        ({"init_from": "no/such/run"}, Letters(), "no/such/run holds no run"),
    ],
)
def test_a_failed_start_changes_nothing(
    options: dict, source: Letters | None, said: str, tmp_path: Path
) -> None:
    from jaxblt.training.loop import fit

    (tmp_path / "there").mkdir()
    for folder in ("there", "runs/new"):
        with pytest.raises((ValueError, OSError), match=re.escape(said)):
            fit(tiny_recipe(**options), tmp_path / folder, source=source)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]
