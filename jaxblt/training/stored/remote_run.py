"""Run folders elsewhere (`s3://`, `gs://`): read by way of a temporary copy, trained in a copy that is carried over.

Orbax writes to local folders. A copy of each finished step is uploaded, its list of files last: a step without its list
is not whole, and is not read.
"""

import fcntl
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax

from jaxblt.boxed import is_boxed, unpacked
from jaxblt.remote import RemoteFile, download, list_files, remove, scheme_of, upload, url_of
from jaxblt.training.preemption import StopRequest
from jaxblt.training.stored.integrity import FILE_LIST

CONFIG = "config.json"
STEP = re.compile(r"(checkpoints|frozen/[0-9a-f]{64})/([0-9]+)/.+")
"""Files of a step, named relative to the run folder."""
ASIDE = ".aside"
"""In the names of steps that a run left behind."""
READ_ONLY = ("http", "https", "hf")
UPLOAD_EVERY_S = 30.0
COPY, KEPT = "jaxblt-run-", "jaxblt-kept-"
"""What names of temporary copies begin with, and of those that hold what could not be uploaded."""
YOUNG_S = 600.0
"""Seconds for which a copy may be without its lock: it is being made."""

Steps = Literal["newest", "all", "none"] | int
"""Which checkpoints are needed; those of frozen trees come with any of them."""

logger = logging.getLogger(__name__)


@contextmanager
def readable(run_dir: str | os.PathLike[str], steps: Steps) -> Iterator[Path]:
    """Yield the folder of a run; of a remote one a temporary copy of its config and these checkpoints.

    A run that comes with jaxblt is named by its name, such as "english", where no folder is called so.

    Errors name the remote folder in place of the copy.

    Raises:
      FileNotFoundError: the remote folder holds no run.
      ValueError, ImportError, OSError: it cannot be read; see `jaxblt.remote`.
    """
    if is_boxed(run_dir):
        yield unpacked(str(run_dir))
        return
    url = url_of(run_dir)
    if url is None:
        yield Path(os.path.expanduser(run_dir))
        return
    with _make_copy() as folder, _renamed(str(folder), url):
        files = list_files(url)
        if CONFIG not in files:
            raise FileNotFoundError(f"{url} holds no run: {url}/{CONFIG} does not exist")
        _fetch(files, _wanted(files, steps, url), folder)
        yield folder


@contextmanager
def _make_copy() -> Iterator[Path]:
    """Make a temporary folder, and remove it at the end if it still has its name; also those of killed processes.

    Its lock is the operating system's, so none outlives its process.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{COPY}*"):
        if _is_left(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=COPY))
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _is_left(folder: Path) -> bool:
    """Return whether a copy is the user's, and nobody has used it for a while."""
    try:
        found = os.lstat(folder)
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < YOUNG_S:
            return False
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _wanted(files: Collection[str], steps: Steps, url: str) -> list[str]:
    """Return the config, and files of the whole steps asked for."""
    if steps == "none":
        return [CONFIG]
    found: dict[str, list[str]] = {}
    for name in files:
        if name.startswith("checkpoints/") and (step := _step_of(name)) and f"{step}/{FILE_LIST}" in files:
            found.setdefault(step, []).append(name)
    order = sorted(found, key=lambda step: int(step.rpartition("/")[2]))
    chosen = order if steps == "all" else order[-1:] if steps == "newest" else [f"checkpoints/{steps}"]
    if isinstance(steps, int) and chosen[0] not in found:
        there = [int(step.rpartition("/")[2]) for step in order]
        raise FileNotFoundError(f"no checkpoint of step {steps} in {url}; there are {there or 'none'}")
    frozen = [name for name in files if name.startswith("frozen/") and _step_of(name)]
    return [CONFIG, *frozen, *(name for step in chosen for name in found[step])]


def _step_of(name: str) -> str | None:
    """Return the folder of the step that a file belongs to; None of another file."""
    found = STEP.fullmatch(name)
    return None if found is None else f"{found[1]}/{found[2]}"


def _fetch(files: dict[str, RemoteFile], names: Collection[str], folder: Path) -> None:
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{files[name].url} leads out of its folder: remove it")
        download(files[name].url, folder / name)


@contextmanager
def _renamed(folder: str, url: str) -> Iterator[None]:
    """Have errors name the remote folder: the copy is gone when somebody reads them."""
    try:
        yield
    except Exception as error:
        error.args = tuple(arg.replace(folder, url) if isinstance(arg, str) else arg for arg in error.args)
        raise


def holds_run(run_dir: str | os.PathLike[str]) -> bool:
    """Return whether a folder, here or elsewhere, has the config of a run."""
    url = url_of(run_dir)
    return (Path(run_dir) / CONFIG).exists() if url is None else CONFIG in list_files(url)


@contextmanager
def trained_in(run_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to train in: the run's own, or a copy of a remote one, whose changes are carried over.

    They are uploaded every 30 s and at the end. Where the last upload fails the copy is kept, and the error names it.
    Nothing keeps a second trainer out of a remote folder.

    Raises:
      ValueError: no folder is named, files of this scheme cannot be written, or several processes would each have
        their own copy.
      OSError: the folder cannot be reached.
    """
    if run_dir == "":
        raise ValueError("run_dir is '' (an unset variable?): name a folder (--run-dir), or '.' for this one")
    url = url_of(run_dir)
    if url is None:
        yield Path(os.path.expanduser(run_dir))
        return
    _check_writable(url)
    with _make_copy() as folder:
        mirror, trained = Mirror(url, folder), False
        mirror.fetch()
        try:
            with _renamed(str(folder), url), _repeated(mirror.push):
                yield folder
            trained = True
        finally:
            _push_last(mirror, raises=trained)


def _check_writable(url: str) -> None:
    scheme = scheme_of(url)
    if scheme in READ_ONLY:
        raise ValueError(
            f"run_dir={url!r}: a run cannot be trained on {scheme}://, which is read only here; name a local folder, "
            "or one on s3:// or gs://"
        )
    if set(url) & set("?#"):
        raise ValueError(
            f"run_dir={url!r}: what follows ? or # is no part of a file's name; call the run otherwise"
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"run_dir={url!r} is remote, and {jax.process_count()} processes train: name a folder that all of them see"
        )


@contextmanager
def _repeated(call: Callable[[], None]) -> Iterator[None]:
    """Call every 30 s in a thread until the block ends; a failure is logged, and the next call tries again."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(UPLOAD_EVERY_S):
            try:
                call()
            except Exception as error:
                logger.warning("not uploaded yet: %s", error)

    thread = threading.Thread(target=repeat, name="upload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _push_last(mirror: "Mirror", *, raises: bool) -> None:
    """Upload what is left; an error in training is not hidden by one of the upload, which keeps the copy."""
    try:
        # A launcher sends its signal more than once: the second must not cut what the first asked to save.
        with StopRequest():
            mirror.push()
    except BaseException as error:
        kept = mirror.folder.rename(mirror.folder.with_name(mirror.folder.name.replace(COPY, KEPT)))
        told = f"{mirror.url} lacks the latest files: {error}; they are in {kept}, copy them over"
        if not isinstance(error, Exception):
            raise
        if raises:
            raise OSError(told) from error
        logger.warning("%s", told)


class Mirror:
    """A local folder, and what the remote folder has of it.

    Args:
      url: of the remote folder.
      folder: the local one.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self._there: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Download all but events, profiles, and steps that are not whole or were set aside."""
        files = list_files(self.url)
        if CONFIG not in files:
            return
        whole = [n for n in files if (step := _step_of(n)) is None or f"{step}/{FILE_LIST}" in files]
        away = ("tensorboard/", "profile/")
        names = [name for name in whole if not (name.startswith(away) or ASIDE in name)]
        _fetch(files, names, self.folder)
        self._there = {name: self._stat(name) for name in names}

    def push(self) -> None:
        """Upload what is new or changed, steps whole and their lists last; remove what is gone here."""
        for name in sorted(self._names(), key=_upload_order):
            try:
                stat = self._stat(name)
                if self._there.get(name) != stat:
                    upload(self.folder / name, f"{self.url}/{name}")
                    self._there[name] = stat
            except FileNotFoundError:
                continue  # a step that the run no longer keeps, or a log that was replaced meanwhile
        gone = [name for name in self._there if not (self.folder / name).exists()]
        for name in sorted(gone, key=lambda name: not name.endswith(f"/{FILE_LIST}")):
            remove(f"{self.url}/{name}")
            del self._there[name]

    def _stat(self, name: str) -> tuple[int, int]:
        found = (self.folder / name).stat()
        return found.st_size, found.st_mtime_ns

    def _names(self) -> Iterator[str]:
        """List files of finished steps, and all others except those that are of this machine or half written."""
        for parent, _, files in os.walk(self.folder):
            for file in files:
                name = Path(parent, file).relative_to(self.folder).as_posix()
                in_steps = name.startswith(("checkpoints/", "frozen/"))
                kept = _step_of(name) or ASIDE in name
                if kept or not (in_steps or name.endswith((".partial", ".lock"))):
                    yield name


def _upload_order(name: str) -> tuple[int, str, bool, str]:
    """Order a run's files so that a kill at any time leaves a run that goes on without a gap.

    Earlier configs before the config that takes their place, and this before what is made by it. Logs before the steps
    that they lead to, for a run that resumes at a step never logs those before again. Of a step its list of files last.
    """
    step = _step_of(name)
    kinds = (name.startswith("configs/"), name == CONFIG, step is None, name.startswith("frozen/"), True)
    return kinds.index(True), step or "", name.endswith(f"/{FILE_LIST}"), name
