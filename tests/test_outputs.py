"""Commands write no file over their input, none over what is there unless asked, and none in part."""

import errno
import os

import pytest
from safetensors import SafetensorError

from jaxblt.outputs import check_output, whole_file, write_text


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "g.fa").write_text(">g\nACGT\n")
    (tmp_path / "link.fa").symlink_to("g.fa")
    os.link("g.fa", "hard.fa")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", ["g.fa", "./g.fa", "run/../g.fa", "link.fa", "hard.fa", "run/checkpoints/a"])
def test_an_input_is_never_written(here, name):
    inputs = ("s3://bucket/g.fa", "g.fa", "run/checkpoints")
    with pytest.raises(ValueError, match=f"--out {name} is read by this command, as .*: it would be lost"):
        check_output("--out", name, inputs=inputs, overwrite=True)
    with pytest.raises(ValueError, match=r"is read by this command, as link\.fa"):
        check_output("--out", here / "g.fa", inputs=("link.fa",), overwrite=True)


def test_what_is_there_is_overwritten_only_if_asked(here):
    (here / "a.tsv").write_text("mine")
    with pytest.raises(
        FileExistsError, match=r"--out a\.tsv is there already, and nothing is overwritten: .*--overw"
    ):
        check_output("--out", "a.tsv", inputs=("g.fa",))
    check_output("--out", "a.tsv", inputs=("g.fa",), overwrite=True)
    check_output("--out", "new/b.tsv", inputs=("g.fa", "run"))
    for name in ("run", "/dev/null"):
        with pytest.raises(ValueError, match=f"--out {name} is no regular file"):
            check_output("--out", name, overwrite=True)
    with pytest.raises(ValueError, match="is remote"):
        check_output("--out", "s3://bucket/a.tsv")


def test_a_folder_that_cannot_be_written_is_told_before_the_work(here, monkeypatch):
    with pytest.raises(
        PermissionError, match=r"--out g\.fa/a\.tsv cannot be made: .*g\.fa is no folder that can be"
    ):
        check_output("--out", "g.fa/a.tsv")
    # Root may write everywhere
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"--out run/new/a\.tsv cannot be made: .*/run is no folder"):
        check_output("--out", "run/new/a.tsv")


def test_a_file_appears_whole_or_not_at_all(here):
    (here / "a.tsv").write_text("mine")

    def fail():
        with whole_file("a.tsv") as partial:
            partial.write_text("half")
            raise KeyError("stopped")

    with pytest.raises(KeyError):
        fail()
    assert (here / "a.tsv").read_text() == "mine"
    write_text("link.fa", "other")
    assert (here / "g.fa").read_text() == "other"
    assert (here / "link.fa").is_symlink()
    assert sorted(os.listdir(here)) == ["a.tsv", "g.fa", "hard.fa", "link.fa", "run"]


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["disk", "quota", "safetensors"],
)
def test_a_full_disk_is_told_with_the_file(here, full):
    def fail():
        with whole_file("a.tsv") as partial:
            partial.write_text("half")
            raise full

    with pytest.raises(
        OSError, match=r"no space left on its disk: free some, or name another file: 'a\.tsv'"
    ):
        fail()
    assert "a.tsv" not in os.listdir(here)
