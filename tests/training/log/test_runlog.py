import json
import struct
import tempfile
import time
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tqdm
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from jaxblt.training.log import runlog
from jaxblt.training.log.runlog import Progress, RunLog, read_metrics


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(3 * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def events(run: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return accumulator


def lines(run: Path) -> list[dict]:
    return list(read_metrics(run / "metrics.jsonl"))


def test_both_files_hold_what_was_logged(tmp_path: Path) -> None:
    losses = np.random.default_rng(0).standard_normal(5).astype(np.float32)
    with RunLog(tmp_path) as log:
        for step, loss in enumerate(losses):
            log.scalars(step, {"loss": loss, "lr": jnp.float32(0.1), "patches": np.int64(7), "x": 1 / 3})
        log.image(3, "patches", png(5, 2))
        log.text(4, "sample", "héllo")
        log.steps(5, "skipped_steps", [4, 5])
    found = events(tmp_path)
    assert [(e.step, np.float32(e.value)) for e in found.Scalars("train/loss")] == list(enumerate(losses))
    picture = found.Images("train/patches")[0]
    assert (picture.step, picture.width, picture.height) == (3, 5, 2)
    assert picture.encoded_image_string == png(5, 2)
    assert found.Tensors("train/sample")[0].tensor_proto.string_val[0].decode() == "héllo"
    *read, skipped = lines(tmp_path)
    assert skipped == {"step": 5, "skipped_steps": [4, 5]}
    assert [entry["step"] for entry in read] == list(range(5))
    assert np.array([entry["loss"] for entry in read], np.float32).tobytes() == losses.tobytes()
    assert read[0]["x"] == 1 / 3
    assert (read[0]["patches"], type(read[0]["patches"])) == (7, int)


@pytest.mark.parametrize(
    "value", [np.float64(0.1), np.float32(0.1), jnp.bfloat16(0.1), np.inf, 5e-324, np.pi]
)
def test_numbers_read_back_to_the_same_bits(tmp_path: Path, value: float) -> None:
    with RunLog(tmp_path) as log:
        log.scalars(1, {"v": value, "nan": float("nan")})
    entry = lines(tmp_path)[0]
    assert np.asarray(entry["v"], np.asarray(value).dtype).tobytes() == np.asarray(value).tobytes()
    assert np.isnan(entry["nan"])


def test_resuming_forgets_later_steps_and_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a second, whose nanoseconds have ever more digits."""
    began = time.time_ns() // 10**9 * 10**9
    moments = iter([began + 99_999_999, began + 100_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))
    with RunLog(tmp_path) as log:
        for step in range(6):
            log.scalars(step, {"loss": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    with RunLog(tmp_path) as log:
        log.truncate_after(3)
        for step in range(4, 8):
            log.scalars(step, {"loss": 10 * step})
    want = [(s, s) for s in range(4)] + [(s, 10 * s) for s in range(4, 8)]
    assert [(entry["step"], entry["loss"]) for entry in lines(tmp_path)] == want
    assert [(e.step, int(e.value)) for e in events(tmp_path).Scalars("train/loss")] == want
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    "foreign", ["{'loss': 1}", "loss 2.3", "[1, 2]", '{"loss": 1}', '{"step": "3"}', "", "\0\0", "[" * 10_000]
)
def test_a_foreign_line_is_named_and_nothing_is_changed(tmp_path: Path, foreign: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + foreign + '\n{"step": 2}\n')
    before = file.read_bytes()
    for call in (lambda: lines(tmp_path), lambda: RunLog(tmp_path)):
        with pytest.raises(ValueError, match=rf"^{file}, line 2: .* is no log line.*delete that line$"):
            call()
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


SOUND = b'{"step": 3, "loss": 0.5, "grad_norm": NaN}'
FOREIGN = (b"{}", b"3", b"[]", b"null", b"1e999", b'{"loss": 1}', b'{"step": "x"}', b"[" * 5000, b"9" * 5000)
CUT = st.integers(0, len(SOUND)).map(lambda end: SOUND[:end])


@given(st.lists(st.binary(max_size=12) | st.just(SOUND) | CUT | st.sampled_from(FOREIGN)))
def test_any_file_is_read_or_refused(content: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\n".join(content))
        file.flush()
        try:
            said = None
            assert all(isinstance(entry["step"], int) for entry in read_metrics(file.name))
        except ValueError as error:
            said = str(error)
    assert said is None or (said.startswith(f"{file.name}, line ") and "\n" not in said)


def test_a_full_disk_is_an_error_of_the_caller(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not of a thread, which would print it and go on."""
    log = RunLog(tmp_path)
    metrics, board = log.trackers
    board._events.close()
    with open("/dev/full", "wb") as full:
        board._events._records = RecordWriter(full)
        with pytest.raises(OSError, match="No space left"):
            log.text(1, "a", "b")
        with pytest.raises(OSError, match="No space left"):
            log.close()
        assert metrics._lines.closed
    assert capfd.readouterr().err == ""


def test_lines_are_on_disk_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.scalars(0, {"loss": 1.0})
    assert lines(tmp_path) == [{"step": 0, "loss": 1.0}]
    log.close()


def test_only_the_main_process_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "run", is_main=False) as log:
        log.scalars(0, {"loss": 1.0})
        log.image(0, "a", png(1, 1))
        log.text(0, "b", "c")
        log.truncate_after(0)
        with log.progress(3) as progress:
            progress.update(1, {"loss": 1.0})
            progress.say("hello")
        log.steps(0, "skipped_steps", [1])
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_bad_values_are_named(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        with pytest.raises(ValueError, match=r"norms=.* is not a scalar"):
            log.scalars(0, {"norms": np.ones(3)})
        with pytest.raises(ValueError, match=r"bytes of a PNG file.*GIF89a"):
            log.image(0, "a", b"GIF89a..........................")
    assert lines(tmp_path) == []
    with pytest.raises(ValueError, match="run_dir='gs://bucket/run' is remote"):
        RunLog("gs://bucket/run")


def test_progress_is_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, start=2) as progress:
        progress.update(3)
        progress.update(4, {"loss": 1.23456789, "bytes/s": 1e6})
        progress.say("saved")
    assert capsys.readouterr().out == "train 4/10  loss 1.2346  bytes/s 1e+06\nsaved\n"


def test_progress_is_a_bar_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runlog, "in_terminal_or_notebook", lambda: True)
    with Progress(10, start=2) as progress:
        progress.update(10, {"loss": 0.5})
    shown = capsys.readouterr().err
    assert "10/10" in shown
    assert "loss 0.5" in shown


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(runlog.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(tqdm.std, "time", lambda: self.now)


def test_estimates_leave_the_compilation_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    with Progress(11) as progress:
        progress.compiling(64)
        clock.now += 500
        progress.compiled(1)
        clock.now += 8
        progress.update(5, {"loss": 1.0})
        clock.now += 12
        progress.update(11, {"loss": 0.5})
    said = "train: compiling the step for rows of 64 bytes\ntrain 5/11 (00:12 left)  loss 1\ntrain 11/11  loss 0.5\n"
    assert capsys.readouterr().out == said
    monkeypatch.setattr(runlog, "in_terminal_or_notebook", lambda: True)
    with Progress(11) as progress:
        progress.compiling(64)
        clock.now += 500
        progress.compiled(1)
        clock.now += 8
        progress.update(5, {"loss": 1.0})
    shown = capsys.readouterr().err
    assert "train: compiling" in shown
    assert "5/11 [00:08<00:12,  2.00s/step" in shown


def test_a_process_without_standard_error_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog.sys, "stderr", None)
    assert not runlog.in_terminal_or_notebook()
