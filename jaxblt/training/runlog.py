"""The run log: scalars, pictures and text for TensorBoard, scalars as JSON lines, and progress for people."""

# Protobuf classes exist at run time only.
# pyright: reportAttributeAccessIssue=false

import json
import os
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm.auto import tqdm

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# IHDR's colour type to the channel count TensorBoard wants.
CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


def read_metrics(file: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a `metrics.jsonl`, in order. A last line that was cut short is left out."""
    with open(file, "rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


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


class RunLog:
    """Writes `<run_dir>/metrics.jsonl`, one object a call, and TensorBoard events in `<run_dir>/tensorboard`.

    JSON numbers read back to the same bits; NaN and infinities are spelt as Python's json does. Every line is
    flushed: a killed process leaves at most one torn line, which `truncate_after` removes.

    Args:
      run_dir: a local directory; made if absent.
      is_main: False on every process but one: all calls then do nothing.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, is_main: bool = True) -> None:
        if "://" in str(run_dir):
            raise ValueError(
                f"run_dir={run_dir!s} is remote: give the log a local one (checkpoints may be remote)"
            )
        self.run_dir, self.is_main = Path(run_dir), is_main
        self.metrics_file = self.run_dir / "metrics.jsonl"
        if is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._lines = open(self.metrics_file, "a", encoding="utf-8")  # noqa: SIM115
            self._events = EventFileWriter(str(self.run_dir / "tensorboard"))

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs numbers (Python's, NumPy's or JAX's 0-d) under their names at `step`."""
        if not self.is_main:
            return
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._lines.write(json.dumps({"step": int(step), **numbers}) + "\n")
        self._lines.flush()
        self._add(step, [summary_pb2.Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()])

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

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(event_pb2.Event(step=int(step), summary=summary_pb2.Summary(value=values)))

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._events.add_event(event)

    def truncate_after(self, step: int) -> None:
        """Forgets what was logged beyond `step`: a run that resumes there will log those steps again."""
        if not self.is_main:
            return
        self._lines.close()
        kept = [entry for entry in read_metrics(self.metrics_file) if entry["step"] <= step]
        partial = self.metrics_file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(partial, self.metrics_file)
        self._lines = open(self.metrics_file, "a", encoding="utf-8")  # noqa: SIM115
        # TensorBoard drops events of later steps when a session starts at this one.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=step + 1, session_log=start))

    def progress(self, total: int, *, start: int = 0, name: str = "train") -> "Progress":
        """Progress of a loop of `total` steps that begins at `start`."""
        return Progress(total, start=start, name=name, show=self.is_main)

    def flush(self) -> None:
        """Returns when everything logged is on disk."""
        if self.is_main:
            self._lines.flush()
            self._events.flush()

    def close(self) -> None:
        if self.is_main:
            self._lines.close()
            self._events.close()

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
