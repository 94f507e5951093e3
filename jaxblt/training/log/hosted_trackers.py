"""Trackers that need a package of their own: Weights & Biases and trackio. Each is imported when a run names it."""

import html
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxblt.training.log.trackers import (
    Hyperparameter,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    grouped,
    png_shape,
)
from jaxblt.training.stored.safe_files import replace_text

PROJECT = "jaxblt"
ID_FILE = "tracker_id.txt"


def run_id(run_dir: Path) -> str:
    """Return the name by which a tracker knows the run again; drawn once for a folder, and kept in it."""
    file = run_dir / ID_FILE
    if not file.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_text(file, secrets.token_hex(4) + "\n")
    return file.read_text(encoding="utf-8").strip()


@contextmanager
def picture_file(png: bytes) -> Iterator[str]:
    """Yield a file of the picture, for as long as it is handed over."""
    png_shape(png)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        file.write_bytes(png)
        yield str(file)


class WandbTracker:
    """Weights & Biases; WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE mean what they mean to it."""

    def __init__(self, run_dir: Path) -> None:
        self._wandb: Any = import_module("wandb")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.name,
            dir=str(run_dir),
            id=f"{run_dir.name}-{run_id(run_dir)}",
            resume="allow",
        )
        # By a step of ours: its own never falls, and a run that resumes logs some steps again
        self._run.define_metric("*", step_metric="step")

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def resume(self, step: int) -> None:
        """Do nothing: charts go by the step that comes with each figure."""

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        self._run.log({"step": step} | {grouped(name): value for name, value in values.items()})

    def image(self, step: int, name: str, png: bytes) -> None:
        with picture_file(png) as file:
            self._run.log({"step": step, grouped(name): self._wandb.Image(file)})

    def text(self, step: int, name: str, text: str) -> None:
        shown = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._run.log({"step": step, grouped(name): shown})

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """trackio, which keeps runs in its own folder (TRACKIO_DIR) and shows them with `trackio show`."""

    def __init__(self, run_dir: Path) -> None:
        self._trackio: Any = import_module("trackio")
        self._name, self._run = f"{run_dir.name}-{run_id(run_dir)}", None

    def _started(self, config: dict[str, Any] | None = None) -> Any:
        if self._run is None:
            self._run = self._trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=self._name,
                config=config,
                resume="allow",
                embed=False,
            )
        return self._run

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        self._started(dict(values))

    def resume(self, step: int) -> None:
        """Do nothing: a step that comes again is drawn again."""

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        self._started().log({grouped(name): value for name, value in values.items()}, step=step)

    def image(self, step: int, name: str, png: bytes) -> None:
        with picture_file(png) as file:
            self._started().log({grouped(name): self._trackio.Image(file)}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._started().log({grouped(name): self._trackio.Markdown(text)}, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""By the names that `train.trackers` takes."""
EXTRAS = ("wandb", "trackio")
"""Trackers that are extras of this package under the same names."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ImportError, with the extra to install, if the package of a tracker is missing."""
    for name in names:
        if name in EXTRAS and find_spec(name) is None:
            raise ImportError(
                f"train.trackers names {name!r}, and its package is not installed: pip install 'jaxblt[{name}]'"
            )


def open_trackers(names: Sequence[str], own: Sequence[Tracker], run_dir: Path) -> list[Tracker]:
    """Open the trackers of these names, and one's own."""
    return [*(TRACKERS[name](run_dir) for name in names), *own]
