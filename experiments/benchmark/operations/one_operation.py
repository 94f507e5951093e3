"""One op's benchmark, kept as a result: python -m experiments.benchmark.operations.one_operation OP OUT SHAPES..."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.benchmark.figures.saved import save


def main(op: str, out: str, *shapes: str) -> None:
    """Run the op's own benchmark in a process that leaves the GPU when it is done, and save what it found.

    Raises:
      RuntimeError: it failed; what it says is above.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        line = [sys.executable, "-m", f"pallas_kernels.{op}.bench", "--shapes", *shapes, "--out", str(found)]
        if status := subprocess.run(line, stdout=subprocess.DEVNULL).returncode:
            raise RuntimeError(f"the benchmark of {op} failed with status {status}")
        save("kernels", out, json.loads(found.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(*sys.argv[1:])
