"""Where a run's figures, pictures and texts go: one protocol, and the trackers that need no extra package.

A tracker that shows figures puts them under `train/`, `eval/` and `time/`. `metrics.jsonl`, which programs read, keeps
the plain names.
"""

# Protobuf classes exist at run time only.
# pyright: reportAttributeAccessIssue=false

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from jaxblt.training.stored.safe_files import open_own, replace_text, size_of

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# IHDR's colour type to the channel count TensorBoard wants.
CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
TIMES = ("seconds", "bytes_per_second", "data_wait", "mfu", "peak_memory_bytes")
"""Figures of speed and memory."""
EVALUATIONS = "validation/"
"""What names of the validation split's figures begin with."""

Hyperparameter = str | int | float | bool


@runtime_checkable
class Tracker(Protocol):
    """Takes what a run logs; one process of a run calls it.

    Steps rise, except that `resume` may take them back. Names are those of `metrics.jsonl`.
    """

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        """Take the recipe by dotted names, before anything else."""
        ...

    def resume(self, step: int) -> None:
        """Know that what was logged beyond `step` will come again."""
        ...

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """Take numbers by name."""
        ...

    def image(self, step: int, name: str, png: bytes) -> None:
        """Take a picture, as the bytes of a PNG file."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Take text in Markdown."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def grouped(name: str) -> str:
    """Write "loss" as "train/loss", "validation/loss" as "eval/loss", "seconds" as "time/seconds"."""
    if name.startswith(EVALUATIONS):
        return f"eval/{name.removeprefix(EVALUATIONS)}"
    return f"time/{name}" if name in TIMES else f"train/{name}"


def hyperparameters_of(config: Any, where: str = "") -> dict[str, Hyperparameter]:
    """Return the fields of nested configs by dotted names; tuples and None as text, a part by the name of its class."""
    found: dict[str, Hyperparameter] = {}
    named = (
        {f.name: getattr(config, f.name) for f in fields(config)} if is_dataclass(config) else dict(config)
    )
    for name, value in named.items():
        path = f"{where}.{name}" if where else name
        if is_dataclass(value) or (isinstance(value, Mapping) and all(map(is_dataclass, value.values()))):
            if is_dataclass(value):
                found[path] = type(value).__name__
            found |= hyperparameters_of(value, path)
        else:
            found[path] = value if isinstance(value, Hyperparameter) else str(value)
    return found


def read_metrics(file: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the objects of a `metrics.jsonl`, in order. A last line that was cut short is left out.

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


class JsonlTracker:
    """`<run_dir>/metrics.jsonl`, one object a call; pictures and texts go elsewhere, the recipe into `config.json`.

    Numbers read back to the same bits; NaN and infinities are spelt as Python's json does. Every line is flushed: a
    killed process leaves at most one torn line, which `resume` removes.

    Raises:
      ValueError: the folder holds a `metrics.jsonl` with lines that are none of a log.
    """

    def __init__(self, run_dir: Path) -> None:
        self.file = run_dir / "metrics.jsonl"
        self._entries()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = self._opened()

    def _opened(self) -> TextIO:
        return open(self.file, "a", encoding="utf-8", opener=open_own)

    def _entries(self) -> list[dict[str, Any]]:
        try:
            size_of(self.file, self.file.parent)
        except FileNotFoundError:
            return []
        return list(read_metrics(self.file))

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        """Do nothing: `config.json` holds them."""

    def resume(self, step: int) -> None:
        self._lines.close()
        kept = [entry for entry in self._entries() if entry["step"] <= step]
        replace_text(self.file, "".join(json.dumps(entry) + "\n" for entry in kept))
        self._lines = self._opened()

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        self.line(step, values)

    def line(self, step: int, values: Mapping[str, Any]) -> None:
        """Write an object, of numbers or of lists of numbers."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()

    def image(self, step: int, name: str, png: bytes) -> None:
        """Do nothing: a line holds no picture."""

    def text(self, step: int, name: str, text: str) -> None:
        """Do nothing: lines hold numbers."""

    def close(self) -> None:
        self._lines.close()


class EventFile:
    """TensorBoard's events of one process, written by its caller: a thread's error would only be printed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{os.getpid()}.{now % 10**9:09}"
        self._records = RecordWriter(open(folder / name, "ab", opener=open_own))  # noqa: SIM115
        self.write(event_pb2.Event(file_version="brain.Event:2"))

    def write(self, event: event_pb2.Event) -> None:
        """Write an event, with the time of now, and flush it."""
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class TensorBoardTracker:
    """TensorBoard events in `<run_dir>/tensorboard`, by its own event writer, without TensorFlow."""

    def __init__(self, run_dir: Path) -> None:
        self._name, self._events = run_dir.name, EventFile(run_dir / "tensorboard")

    def hyperparameters(self, values: Mapping[str, Hyperparameter]) -> None:
        summary = hparams_pb(dict(values), trial_id=self._name, start_time_secs=time.time())
        self._events.write(event_pb2.Event(step=0, summary=summary))

    def resume(self, step: int) -> None:
        """Start a session at the next step: TensorBoard then drops events of later ones."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._events.write(event_pb2.Event(step=step + 1, session_log=start))

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        self._add(
            step, [summary_pb2.Summary.Value(tag=grouped(k), simple_value=v) for k, v in values.items()]
        )

    def image(self, step: int, name: str, png: bytes) -> None:
        width, height, channels = png_shape(png)
        picture = summary_pb2.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=png
        )
        self._add(step, [summary_pb2.Summary.Value(tag=grouped(name), image=picture)])

    def text(self, step: int, name: str, text: str) -> None:
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag=grouped(name),
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._add(step, [value])

    def close(self) -> None:
        self._events.close()

    def _add(self, step: int, values: list[Any]) -> None:
        self._events.write(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))


def png_shape(png: bytes) -> tuple[int, int, int]:
    """Read width, height and channels of a PNG file.

    Raises:
      ValueError: the bytes are of something else.
    """
    if png[:8] != PNG_SIGNATURE or len(png) < 26:
        raise ValueError(f"an image must be the bytes of a PNG file; these start with {png[:8]!r}")
    width, height = struct.unpack(">II", png[16:24])
    return width, height, CHANNELS[png[25]]
