"""A run's measured figures as JSON: python -m experiments.benchmark record RUN_DIR --evaluation FILE --out FILE."""

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from experiments.benchmark.figures.saved import save
from jaxblt.profiling.provenance import ORIGIN


def record(run_dir: Annotated[str, tyro.conf.Positional], evaluation: str, out: str) -> dict[str, Any]:
    """Write speed and quality of a finished run, from its log and an evaluation; where it ran, from its config.

    Args:
      run_dir: folder with config.json and metrics.jsonl.
      evaluation: JSON that experiments.evaluate wrote.
      out: file to write.

    Raises:
      ValueError: the evaluation is of another run, or rows are not full, so that their bytes are not known.
    """
    from jaxblt.training.log.runlog import read_metrics

    written = list(read_metrics(Path(run_dir) / "metrics.jsonl"))
    lines = [line for line in written if "bytes_per_second" in line]
    validation = [line["validation/bits_per_byte"] for line in written if "validation/bits_per_byte" in line]
    config = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))
    scored = json.loads(Path(evaluation).read_text(encoding="utf-8"))
    recipe = config["recipe"]
    data = recipe["data"]
    _check(recipe, scored, lines[-1]["step"])
    seen = lines[-1]["step"] * data["batch_size"] * data["seq_len"]
    rate = median(line["bytes_per_second"] for line in lines)
    found = {
        "run": scored["run"],
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
    save("record", out, found, origin={name: config[name] for name in ORIGIN})
    return found


def _check(recipe: dict[str, Any], scored: dict[str, Any], steps: int) -> None:
    # Count steps behind the log's last line too: the run may have been stopped before the next line.
    if scored["run"] != recipe["name"] or scored["step"] >= steps + recipe["train"]["log_every"]:
        raise ValueError(
            f"the evaluation is of run {scored['run']!r} at step {scored['step']}, and the folder holds "
            f"{recipe['name']!r} of {steps} steps: name the evaluation of this run"
        )
    rows = {name: recipe["data"].get(name) for name in ("packing", "partial")}
    if rows != {"packing": "windows", "partial": "drop"}:
        raise ValueError(
            f"the rows of the run's data may hold padding, as it has {rows}, and bytes are counted by full rows: "
            "record a run with packing='windows' and partial='drop'"
        )
