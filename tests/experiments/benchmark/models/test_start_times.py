"""The benchmark of starts, without a run."""

import json
import sys

import pytest

from experiments.benchmark.__main__ import main
from experiments.benchmark.models import start_times

WRITES = "import sys; assert sys.pycache_prefix and not sys.dont_write_bytecode; "
LINE = "first step after 1.5 s: data 0.5, compiling and the first step 1.0"


def test_starts_with_and_without_what_an_earlier_one_left(monkeypatch, tmp_path):
    """A cold start finds an empty cache, and the warm one behind it finds what that left. Both find bytecode."""

    def command(name, run, cache):
        left = cache / "left"
        if not left.exists():
            cache.mkdir(parents=True)
            left.touch()
            return [
                sys.executable,
                "-c",
                f"{WRITES}print({LINE.replace('0.5', '2.5')!r}, flush=True); import time; time.sleep(60)",
            ]
        return [sys.executable, "-c", f"{WRITES}print({LINE!r}, flush=True)"]

    monkeypatch.setattr(start_times, "_command", command)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    out = tmp_path / "starts.json"
    main(["start_times", "--out", str(out), "--recipes", "mqar", "--repeats", "2"])
    found = json.loads(out.read_text())["recipes"]["mqar"]
    assert found["cold"]["parts"] == {"data": 2.5, "compiling and the first step": 1.0}
    assert found["warm"]["parts"] == {"data": 0.5, "compiling and the first step": 1.0}
    assert found["cold"]["seconds"]["trials"] == found["warm"]["seconds"]["trials"] == 2
    assert found["warm"]["seconds"]["low"] <= found["warm"]["seconds"]["median"]


def test_a_run_without_a_first_step_is_told_with_what_it_said(monkeypatch, tmp_path):
    monkeypatch.setattr(start_times, "_command", lambda *_: [sys.executable, "-c", "print('no GPU')"])
    with pytest.raises(RuntimeError, match="demo ended before its first step:\nno GPU"):
        start_times.started("demo", tmp_path / "run", tmp_path / "cache", ())
