"""A run's folder while it trains: one trainer at a time, nothing left of a failed start, one error if it is full."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxblt.outputs import FULL, is_full
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.stored.links import check_stored
from jaxblt.training.stored.resolved import checkpoint_dir
from jaxblt.training.stored.safe_files import UnsafeFile, open_own

LOCK = "trainer.lock"
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)

logger = logging.getLogger(__name__)


class FolderInUse(RuntimeError):
    """Another process trains in the run folder."""


@contextmanager
def open_checkpoints(run_dir: str | os.PathLike[str], *, keep: int, is_main: bool) -> Iterator[Checkpointer]:
    """Claim a run's folder and open its checkpoints, `keep` of the newest; errors as of `claimed`."""
    with (
        claimed(run_dir, is_main=is_main),
        Checkpointer(checkpoint_dir(run_dir), keep=keep) as checkpoints,
    ):
        yield checkpoints


@contextmanager
def claimed(run_dir: str | os.PathLike[str], *, is_main: bool) -> Iterator[None]:
    """Make the folder and keep other trainers out of it until the block ends; every process enters.

    The lock is the operating system's, so none outlives its process. Folders that were made and are still empty at the
    end are removed. A disk that is full, whoever meets it inside the block, becomes one OSError that names the folder.

    Raises:
      FolderInUse: another process trains there, or in a folder that its checkpoints are linked to.
      UnsafeFile: its checkpoints are not to be read or written, see `check_stored`; or the lock's file is a link.
      PermissionError: the folder is not to be made or written; says what to do.
      OSError: it cannot be, for another reason, or its disk is full.
    """
    with _one_error_if_full(run_dir), ExitStack() as held:
        refused: Exception | None = None
        if is_main:
            try:
                held.enter_context(_made(Path(run_dir)))
                held.enter_context(_locked(Path(run_dir) / LOCK))
                for folder in check_stored(run_dir):
                    held.enter_context(_locked(folder / LOCK))
            except (OSError, FolderInUse, UnsafeFile) as error:
                refused = _explained(error, run_dir)
        _raise_together(refused, run_dir)
        yield


def _explained(error: Exception, run_dir: str | os.PathLike[str]) -> Exception:
    """Return the error, or one that says what to do if the folder is read-only or cannot be a folder."""
    if not isinstance(error, OSError) or error.errno in (None, *FULL) or error.filename is None:
        return error
    where = f"({os.strerror(error.errno)}: {error.filename!r})"
    if error.errno in READ_ONLY:
        said: OSError = PermissionError(
            f"run folder {str(run_dir)!r} cannot be written {where}: make it writable, or choose another (--run-dir); "
            "a copy of this one goes on where it stopped"
        )
    else:
        said = OSError(f"run folder {str(run_dir)!r} cannot be made {where}: choose another (--run-dir)")
    said.__cause__ = error
    return said


def _raise_together(refused: Exception | None, run_dir: str | os.PathLike[str]) -> None:
    """Raise in every process what process 0 met, or the others would wait for it for ever."""
    fine = refused is None
    if jax.process_count() > 1:
        fine = bool(multihost_utils.broadcast_one_to_all(np.asarray(fine, np.int32)))
    if refused is not None:
        raise refused
    if not fine:
        raise FolderInUse(f"process 0 could not claim {run_dir}, and says why")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in new:
            # rmdir fails for a folder that holds anything: it is to stay
            with suppress(OSError):
                path.rmdir()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    handle = _lock(file)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _lock(file: Path) -> int:
    """Lock the file and return its descriptor; closing it gives the lock back, as the end of the process does."""
    while True:
        handle = open_own(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 200).decode("utf-8", "replace") or "another process"
            os.close(handle)
            raise FolderInUse(
                f"{file.parent} is in use: {holder} trains there; wait for its end, or choose another run folder"
            ) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second trainer there", file.parent, error)
            return handle
        # A holder that ended in between removed the file: a lock on what has no name keeps nobody out.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                return handle
        os.close(handle)


@contextmanager
def _one_error_if_full(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise OSError(
            errno.ENOSPC,
            "no space left on the disk: free some, then fit again, which goes on from the last whole checkpoint",
            str(run_dir),
        ) from error
