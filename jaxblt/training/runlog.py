"""The run log: scalars, pictures and text for TensorBoard, scalars as JSON lines, and progress for people."""

# Protobuf classes exist at run time only.
# pyright: reportAttributeAccessIssue=false

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm.auto import tqdm

from jaxblt.remote import refuse_remote
from jaxblt.training.resolved import replace_text

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# IHDR's colour type to the channel count TensorBoard wants.
CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


def read_metrics(file: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a `metrics.jsonl`, in order. A last line that was cut short is left out.

    Raises:
      ValueError: another line is no object with a "step".
    """
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield _entry(line, f"{file}, line {number}")


def _entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise ValueError(
            f'{where}: {line[:60]!r} is no log line, which is {{"step": 1, ...}}: delete that line'
        )
    return entry


def _number(name: str, value: Any) -> float | int:
    if isinstance(value, str) or np.ndim(value) != 0:
        raise ValueError(f"{name}={value!r} is not a scalar: log a mean, or use `text` or `image`")
    item = np.asarray(value).item() if np.asarray(value).dtype.kind in "biu" else float(value)
    return int(item) if isinstance(item, bool) else item


def _png_shape(png: bytes) -> tuple[int, int, int]:
    if png[:8] != PNG_SIGNATURE or len(png) < 26:
        raise ValueError(f"an image must be the bytes of a PNG file; these start with {png[:8]!r}")
    width, height = struct.unpack(">II", png[16:24])
    return width, height, CHANNELS[png[25]]


class EventFile:
    """TensorBoard's events of one process, written by its caller: a thread's error would only be printed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        self._records = RecordWriter(open(folder / name, "ab"))  # noqa: SIM115
        self.write(event_pb2.Event(file_version="brain.Event:2"))

    def write(self, event: event_pb2.Event) -> None:
        """Writes an event, with the time of now, and flushes it."""
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class RunLog:
    """Writes `<run_dir>/metrics.jsonl`, one object a call, and TensorBoard events in `<run_dir>/tensorboard`.

    JSON numbers read back to the same bits; NaN and infinities are spelt as Python's json does. Every line is
    flushed: a killed process leaves at most one torn line, which `truncate_after` removes.

    Args:
      run_dir: a local directory; made if absent.
      is_main: False on every process but one: all calls then do nothing.

    Raises:
      ValueError: the directory is remote, or holds a `metrics.jsonl` with lines that are none of a log.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, is_main: bool = True) -> None:
        refuse_remote("run_dir", run_dir)
        self.run_dir, self.is_main = Path(run_dir), is_main
        self.metrics_file = self.run_dir / "metrics.jsonl"
        if is_main:
            self._entries()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lines = open(self.metrics_file, "a", encoding="utf-8")  # noqa: SIM115
            self._events = EventFile(self.run_dir / "tensorboard")

    def _entries(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.metrics_file)) if self.metrics_file.exists() else []

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers (Python's, NumPy's or JAX's 0-d) under their names at `step`."""
        if not self.is_main:
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._write_line({"step": int(step), **numbers})
        self._add(step, [summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()])

    def steps(self, step: int, name: str, which: list[int]) -> None:
        """Logs the numbers of steps, as of those that were skipped, under a name at `step`."""
        if self.is_main:
            self._write_line({"step": int(step), name: which})
            self.text(step, name, ", ".join(map(str, which)))

    def image(self, step: int, name: str, png: bytes) -> None:
        """Logs a picture, given as the bytes of a PNG file."""
        if not self.is_main:
            return
        width, height, channels = _png_shape(png)
        picture = summary_pb2.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png
        )
        self._add(step, [summary_pb2.Summary.Value(tag=name, image=picture)])

    def text(self, step: int, name: str, text: str) -> None:
        """Logs text, shown as Markdown."""
        if not self.is_main:
            return
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag=name,
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._add(step, [value])

    def _write_line(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps(entry) + "\n")
        self._lines.flush()

    def _add(self, step: int, values: list[Any]) -> None:
        self._events.write(event_pb2.Event(step=int(step), summary=summary_pb2.Summary(value=values)))

    def truncate_after(self, step: int) -> None:
        """Forgets what was logged beyond `step`: a run that resumes there will log those steps again."""
        if not self.is_main:
            return
        self._lines.close()
        kept = [entry for entry in self._entries() if entry["step"] <= step]
        replace_text(self.metrics_file, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._lines = open(self.metrics_file, "a", encoding="utf-8")  # noqa: SIM115
        # TensorBoard drops events of later steps when a session starts at this one.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.write(event_pb2.Event(step=step + 1, session_log=start))

    def progress(self, total: int, *, start: int = 0, name: str = "train") -> "Progress":
        """Progress of a loop of `total` steps that begins at `start`."""
        return Progress(total, start=start, name=name, show=self.is_main)

    def close(self) -> None:
        if self.is_main:
            # both, even if the first of them finds the disk full
            with closing(self._events), closing(self._lines):
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def in_terminal_or_notebook() -> bool:
    """Whether a bar that redraws itself will look like one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"


class Progress:
    """A bar in a terminal or notebook, plain lines elsewhere, nothing when `show` is False."""

    def __init__(self, total: int, *, start: int = 0, name: str = "train", show: bool = True) -> None:
        self.total, self.name, self.show, self.step = total, name, show, start
        self._bar = None
        if show and in_terminal_or_notebook():
            self._bar = tqdm(total=total, initial=start, desc=name, unit="step", dynamic_ncols=True)

    def update(self, step: int, values: Mapping[str, float] | None = None) -> None:
        """Moves to `step`; `values` are shown beside the bar, or printed as a line."""
        if self._bar is not None:
            self._bar.update(step - self.step)
            if values:
                self._bar.set_postfix_str(_show(values))
        elif self.show and values:
            print(f"{self.name} {step}/{self.total}  {_show(values)}", flush=True)
        self.step = step

    def say(self, text: str) -> None:
        """Prints a line without breaking the bar."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.show:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _show(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {float(value):.5g}" for name, value in values.items())
