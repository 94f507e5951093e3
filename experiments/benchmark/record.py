"""A run's measured figures as JSON: python -m experiments.benchmark.record RUN_DIR --gpu NAME --evaluation FILE."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from experiments._cli import parse, run


def record(
    run_dir: Annotated[str, tyro.conf.Positional],
    gpu: str,
    commit: str,
    evaluation: str,
    out: str,
) -> dict[str, Any]:
    """Speed and quality of a finished run, from its log and an evaluation; nothing is typed in but what ran where.

    Args:
      run_dir: folder with config.json and metrics.jsonl.
      gpu: name of the device that ran it.
      commit: git commit that ran.
      evaluation: JSON that experiments.evaluate wrote.
      out: file to write.
    """
    from jaxblt.training.runlog import read_metrics

    written = list(read_metrics(Path(run_dir) / "metrics.jsonl"))
    lines = [line for line in written if "bytes_per_second" in line]
    validation = [line["validation/bits_per_byte"] for line in written if "validation/bits_per_byte" in line]
    config = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))
    scored = json.loads(Path(evaluation).read_text(encoding="utf-8"))
    data = config["recipe"]["data"]
    seen = lines[-1]["step"] * data["batch_size"] * data["seq_len"]
    rate = median(line["bytes_per_second"] for line in lines)
    found = {
        "run": scored["run"],
        "device": gpu,
        "git_commit": commit,
        "versions": config["versions"],
        "steps": lines[-1]["step"],
        "bytes_seen": seen,
        "training_seconds": lines[-1]["seconds"],
        "seconds_in_steps": seen / rate,
        "bytes_per_second": rate,
        "mfu": median(line["mfu"] for line in lines if "mfu" in line),
        "data_wait": median(line["data_wait"] for line in lines),
        "peak_memory_bytes": lines[-1].get("peak_memory_bytes"),
        "last_training_bits_per_byte": lines[-1]["bits_per_byte"],
        "validation_bits_per_byte": validation,
        "evaluation": scored,
    }
    Path(out).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def main(argv: Sequence[str]) -> None:
    """Parses and writes."""
    parse(record, argv, script="experiments.benchmark.record")


if __name__ == "__main__":
    run(main)
