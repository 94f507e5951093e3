"""What each layer promises and what was found, as JSON.

    python -m experiments.benchmark.peers.conformance.measure FILE ROOM [ROOM ...]

A room is a module of bridges beside this one, such as `fla_ops`. Each subject has a process of its own, and some run
beside each other. The script of each finding is run twice more, in clean processes.

CONFORMANCE_ONLY is a pattern of names. CONFORMANCE_JOBS sets how many subjects run at a time, and CONFORMANCE_TIMES how
often scripts are run again. With CONFORMANCE_UNTUNED=1 kernels in Triton take their first configuration: trying all of
them takes minutes.
"""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

HERE = __name__.rpartition(".")[0] if __name__ != "__main__" else "experiments.benchmark.peers.conformance"
JOBS = int(os.environ.get("CONFORMANCE_JOBS", max(1, (os.cpu_count() or 1) - 1)))
"""The subjects that are checked at a time."""
SECONDS = 3
"""The time between two writes of what was found so far."""
TIMES = int(os.environ.get("CONFORMANCE_TIMES", 2))
"""The clean processes that a script of a finding is run in."""


def measure(out: str, rooms: list[str], only: str = "") -> None:
    """Check subjects of some rooms, whose name has the pattern `only`, and write every few seconds what was found."""
    chosen = [
        (room, at)
        for room in rooms
        for at, subject in enumerate(importlib.import_module(f"{HERE}.{room}").subjects)
        if re.search(only, subject.name)
    ]
    origin = _origin()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(JOBS) as pool:
        waiting = [pool.submit(_measure_apart, room, at, _part(folder, room, at)) for room, at in chosen]
        while waiting:
            done, waiting = wait(waiting, timeout=SECONDS)
            for each in done:
                each.result()
            _write(out, [_part(folder, room, at) for room, at in chosen], origin)


def _part(folder: str, room: str, at: int) -> Path:
    return Path(folder, f"{room}_{at}.json")


def _write(out: str, parts: list[Path], origin: dict[str, Any]) -> None:
    """Write what subjects have found so far; a call that is cut off leaves a whole file."""
    subjects = [json.loads(part.read_text(encoding="utf-8")) for part in parts if part.exists()]
    _replace(Path(out), json.dumps({"subjects": subjects, **origin}, indent=1) + "\n")


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _measure_apart(room: str, at: int, part: Path) -> None:
    """Check a subject in a process of its own: one that ends the process, as on a GPU, takes no other with it."""
    began = time.perf_counter()
    # Let processes share a GPU: JAX would take most of its memory for itself.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    argv = [sys.executable, "-m", f"{HERE}.measure", "--one", room, str(at), str(part)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    if not part.exists():
        raise RuntimeError(f"{room}, subject {at}: {done.stderr[-2000:]}")
    found = json.loads(part.read_text(encoding="utf-8"))
    failed = [name for name, outcome in found["outcomes"].items() if "script" in outcome]
    said = found.get("not_run") or ", ".join(failed)
    print(f"{found['name']}: {time.perf_counter() - began:.0f} s: {said}", flush=True)


def measure_one(room: str, at: int, part: Path) -> None:
    """Check one subject of a room, and write what is found after each property."""
    from jaxblt.testing.conformance import check_each

    if os.environ.get("CONFORMANCE_UNTUNED"):
        take_first_configurations()
    subject = importlib.import_module(f"{HERE}.{room}").subjects[at]
    told: dict[str, Any] = {"name": subject.name, "called": subject.called, "dtype": subject.dtype}
    told |= {"promises": sorted(subject.promises), "outcomes": {}, "not_run": "its process ended"}
    _replace(part, json.dumps(told))
    try:
        told["version"] = None if subject.peer is None else f"{subject.peer} {subject.version}"
        for outcome in check_each(subject):
            if outcome.promised:
                told["outcomes"][outcome.name] = _outcome(outcome)
                _replace(part, json.dumps(told))
    except Exception as error:
        told["not_run"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        del told["not_run"]
    _replace(part, json.dumps(told))


def take_first_configurations() -> None:
    """Let kernels in Triton take the first of their configurations."""
    from triton.runtime import autotuner

    run = autotuner.Autotuner.run

    def run_first(self: Any, *args: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    autotuner.Autotuner.run = run_first


def _outcome(outcome: Any) -> dict[str, Any]:
    found = outcome.finding
    told = {"error": _number(outcome.error), "limit": outcome.limit}
    if found is None:
        return told
    shown = [reproduce(found.script, found.most) for _ in range(TIMES)]
    more = {"length": found.length, "cut": found.cut, "says": found.says, "script": found.script}
    return told | more | {"reproduced": sum(shown)}


def _number(error: float) -> float | None:
    """Return an error, or None if it is infinite."""
    return error if math.isfinite(error) else None


def reproduce(script: str, most: float | None) -> bool:
    """Return whether a script alone shows an error beyond `most`, or fails itself."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "finding.py")
        file.write_text(script, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, timeout=300, cwd=folder, env=_clean()
        )
    if most is None:
        return True if done.returncode else len(set(done.stdout.split())) > 1
    shown = re.findall(r"^[-+.\w]+$", done.stdout, re.MULTILINE)
    return bool(shown) and not float(shown[-1]) <= most


def _clean() -> dict[str, str]:
    """Return the environment without the path of this repository."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    root = str(Path(__file__).resolve().parents[4])
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path and path != root)}


def _origin() -> dict[str, Any]:
    from jaxblt.profiling.provenance import provenance

    told = provenance()
    return {name: told[name] for name in ("time", "python", "cpu", "versions", "git", "devices")}


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        measure_one(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        measure(sys.argv[1], sys.argv[2:], os.environ.get("CONFORMANCE_ONLY", ""))
