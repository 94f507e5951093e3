"""The run log: what goes to a run's trackers, and progress for people."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxblt.remote import refuse_remote
from jaxblt.training.closed_terminal import outliving_terminal
from jaxblt.training.log.progress_bar import tqdm
from jaxblt.training.log.trackers import (
    Hyperparameter,
    JsonlTracker,
    TensorBoardTracker,
    Tracker,
    png_shape,
    read_metrics,
)

__all__ = ["Progress", "RunLog", "in_terminal_or_notebook", "read_metrics"]


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, str) or np.ndim(value) != 0:
        raise ValueError(f"{name}={value!r} is not a scalar: log a mean, or use `text` or `image`")
    item = np.asarray(value).item() if np.asarray(value).dtype.kind in "biu" else float(value)
    return int(item) if isinstance(item, bool) else item


class RunLog:
    """Hands what a run logs to its trackers, by default `metrics.jsonl` and TensorBoard events in the run folder.

    Args:
      run_dir: a local directory; made if absent.
      is_main: False on every process but one: all calls then do nothing.
      trackers: makes the trackers of a folder; it is called on the main process alone.

    Raises:
      ValueError: the directory is remote, or holds a `metrics.jsonl` with lines that are none of a log.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        is_main: bool = True,
        trackers: Callable[[Path], Sequence[Tracker]] = lambda folder: (
            JsonlTracker(folder),
            TensorBoardTracker(folder),
        ),
    ) -> None:
        refuse_remote("run_dir", run_dir)
        self.run_dir, self.is_main = Path(run_dir), is_main
        self.trackers: Sequence[Tracker] = trackers(self.run_dir) if is_main else ()

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        """Log the recipe, by dotted names."""
        for tracker in self.trackers:
            tracker.hyperparameters(values)

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers (Python's, NumPy's or JAX's 0-d) under their names at `step`."""
        if self.trackers:
            numbers = {name: _number(name, value) for name, value in values.items()}
            for tracker in self.trackers:
                tracker.scalars(int(step), numbers)

    def steps(self, step: int, name: str, which: list[int]) -> None:
        """Log the numbers of steps, such as those that were skipped, under a name at `step`."""
        for tracker in self.trackers:
            if isinstance(tracker, JsonlTracker):
                tracker.line(int(step), {name: which})
            else:
                tracker.text(int(step), name, ", ".join(map(str, which)))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Log a picture, given as the bytes of a PNG file."""
        if self.trackers:
            png_shape(png)
        for tracker in self.trackers:
            tracker.image(int(step), name, png)

    def text(self, step: int, name: str, text: str) -> None:
        """Log text, shown as Markdown."""
        for tracker in self.trackers:
            tracker.text(int(step), name, text)

    def truncate_after(self, step: int) -> None:
        """Forget what was logged beyond `step`: a run that resumes there will log those steps again."""
        for tracker in self.trackers:
            tracker.resume(int(step))

    def progress(self, total: int, *, start: int = 0, name: str = "train") -> "Progress":
        """Show the progress of a loop of `total` steps that begins at `start`."""
        return Progress(total, start=start, name=name, show=self.is_main)

    def close(self) -> None:
        # all, even if one of them finds the disk full
        with ExitStack() as stack:
            for tracker in self.trackers:
                stack.enter_context(closing(tracker))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def in_terminal_or_notebook() -> bool:
    """Return whether a bar that redraws itself will look like one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None where the caller closed it
    return is_terminal or type(shell).__name__ == "ZMQInteractiveShell"


class Progress:
    """A bar in a terminal or notebook, plain lines elsewhere, nothing when `show` is False."""

    def __init__(self, total: int, *, start: int = 0, name: str = "train", show: bool = True) -> None:
        self.total, self.name, self.show, self.step = total, name, show, start
        self._since: tuple[float, int] | None = None
        self._bar = None
        if show and in_terminal_or_notebook():
            self._bar = tqdm(total=total, initial=start, desc=name, unit="step", dynamic_ncols=True)

    @outliving_terminal()
    def compiling(self, length: int) -> None:
        """Say that the next step is compiled first, for rows of `length` bytes."""
        if self._bar is not None:
            self._bar.set_description_str(f"{self.name}: compiling")
        else:
            self.say(f"{self.name}: compiling the step for rows of {length} bytes")

    @outliving_terminal()
    def compiled(self, step: int) -> None:
        """Say that it is done: estimates of the time left count from this step on."""
        self._since = time.perf_counter(), step
        if self._bar is not None:
            # Begin tqdm anew, or its rate and estimate would count the compilation as steps
            self._bar.reset()
            self._bar.initial = self._bar.n = self._bar.last_print_n = self.step = step
            self._bar.set_description_str(self.name)

    def left(self, step: int) -> str:
        """Return the time that the steps behind `step` will take, as "3:20"; empty while that is not known."""
        if self._since is None or step <= self._since[1]:
            return ""
        began, first = self._since
        seconds = (time.perf_counter() - began) / (step - first) * (self.total - step)
        return tqdm.format_interval(seconds)

    @outliving_terminal()
    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Move to `step`; `values` are shown beside the bar, or printed as a line."""
        if self._bar is not None:
            self._bar.update(step - self.step)
            if values:
                self._bar.set_postfix_str(_show(values))
        elif self.show and values:
            left = f" ({left} left)" if (left := self.left(step)) and step < self.total else ""
            print(f"{self.name} {step}/{self.total}{left}  {_show(values)}", flush=True)
        self.step = step

    @outliving_terminal()
    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.show:
            print(text, flush=True)

    @outliving_terminal()
    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _show(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {float(value):.5g}" for name, value in values.items())
