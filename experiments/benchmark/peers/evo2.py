"""Evo 2 beside its own code, with the same drawn weights: python -m experiments.benchmark evo2 --out FILE."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.benchmark.figures.saved import check_commit, save
from experiments.benchmark.peers.evo2_setting import PARTS, Part, Setting, Side, Timed
from jaxblt.profiling.provenance import git_commit
from pallas_kernels.runtime import alone


def evo2(
    out: str = "runs/benchmark/evo2.json",
    model: str = "evo2_1b_8k",
    sides: tuple[Side, ...] = ("theirs", "ours"),
    parts: tuple[Part, ...] = PARTS,
    setting: Setting = Setting(),
) -> dict[str, Any]:
    """Time Evo 2 in bf16 here and in its own code (vortex 1.1.0), on one GPU, with the same drawn weights.

    `forward` and `long` are whole passes. `write` writes bytes behind 8K, `write_long` behind 131K, `write_rows` in 64
    rows; caches hold zeros, as if so many bytes had been read. `adapters` is a train step of LoRA, of ours alone.
    `substitutions` reads mutants of a record behind states of their shared prefix, of ours alone; beside it stands
    what `forward` takes for as many. `split` is a pass over one row that all GPUs share, of ours alone. `compared`
    has seconds of the peer over ours.

    The peer runs without flash-attn and Transformer Engine: PyTorch's attention stands in for the first, and input
    projections are bf16. Its Triton kernels are on. Bytes planned or allocated include parameters.

    Args:
      out: JSON file, written anew after each part.
      model: name of a released model, or "tiny" to try the script.
      sides: the peer needs torch, a GPU, and `vtx` 1.1.0.
      parts: what is timed.
      setting: sizes.

    Raises:
      ValueError: there is no such model, or no commit is known.
      RuntimeError: the peer is asked for, and torch, its package or a GPU is not there.
    """
    from experiments.benchmark.peers.evo2_ours import Ours
    from experiments.benchmark.peers.evo2_weights import draw, sizes_of

    check_commit(git_commit()["commit"])
    began = time.perf_counter()
    sizes = sizes_of(model)
    found: dict[str, Any] = {
        "model": model,
        "setting": asdict(setting),
        "parts": {name: {} for name in parts},
    }
    tensors = draw(sizes)
    text = np.random.default_rng(0).choice(np.frombuffer(b"ACGT", np.uint8), setting.checked)
    logits: dict[str, np.ndarray] = {}

    def take(side: Side, runner: Any) -> None:
        logits[side] = runner.logits(text)
        if len(logits) == 2:
            found["difference_of_logits"] = difference(logits["ours"], logits["theirs"])
        for name in (name for name in parts if name in runner.parts):
            found["parts"][name][side] = measured(lambda name=name: runner.prepare(name), setting, runner.why)
            found["seconds_in_all"] = time.perf_counter() - began
            save("evo2", out, found | {"compared": compared(found["parts"], setting)})

    if "theirs" in sides:
        from experiments.benchmark.peers.evo2_vortex import Vortex

        peer = Vortex(sizes, tensors, setting)
        found["peer"] = peer.about()
        take("theirs", peer)
        peer.close()
    if "ours" in sides:
        take("ours", Ours(sizes, tensors, setting, parts))
    return found | {"compared": compared(found["parts"], setting)}


def measured(
    prepare: Callable[[], Timed], setting: Setting, why: Callable[[Exception], str | None]
) -> dict[str, Any]:
    """Return median and all seconds of a call with its figures, or why it did not run.

    Args:
      prepare: makes the call.
      setting: how many trials, and for how long.
      why: names what an exception is of where a part may go without figures, or returns None.
    """
    try:
        with alone():
            timed = prepare()
            timed.call()
            taken: list[float] = []
            while len(taken) < setting.trials and (len(taken) < 2 or sum(taken) < setting.seconds):
                began = time.perf_counter()
                timed.call()
                taken.append(time.perf_counter() - began)
    except Exception as error:
        reason = why(error)
        if reason is None:
            raise
        return {reason: str(error)[:200].partition("\n")[0]}
    figures = {name: value() if callable(value) else value for name, value in timed.figures.items()}
    return {"seconds": statistics.median(taken), "trials": taken} | figures


def difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return how far two tables of logits [T, V] lie apart: relative root mean square, and the same best byte."""
    apart = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    return {"relative": float(apart), "same_best": float(np.mean(ours.argmax(-1) == theirs.argmax(-1)))}


def compared(parts: dict[str, Any], setting: Setting) -> dict[str, float]:
    """Return ratios of the figures that are there, above 1 where ours is better; and the step's MFU."""

    def figure(part: str, side: str, name: str) -> float | None:
        return parts.get(part, {}).get(side, {}).get(name)

    wanted: dict[str, tuple[float | None, float | None]] = {}
    for part in parts:
        wanted[part] = figure(part, "theirs", "seconds"), figure(part, "ours", "seconds")
        wanted[f"{part}_bytes"] = figure(part, "theirs", "peak_bytes"), figure(part, "ours", "peak_bytes")
    one, many = figure("write", "theirs", "seconds"), figure("write_rows", "ours", "seconds")
    wanted["write_rows_over_one_row"] = one and one * setting.rows, many
    wanted["write_over_write_long"] = (
        figure("write", "ours", "seconds"),
        figure("write_long", "ours", "seconds"),
    )
    taken, count = (figure("substitutions", "ours", name) for name in ("seconds", "mutants"))
    shared = taken and count and taken / count
    for side, name in (("ours", "substitutions_over_alone"), ("theirs", "substitutions_over_theirs_alone")):
        alone = figure("forward", side, "seconds")
        wanted[name] = alone and alone / setting.forward[0], shared
    flops, peak = (figure("adapters", "ours", name) for name in ("flops", "peak"))
    wanted["adapters_mfu"] = flops and peak and flops / peak, figure("adapters", "ours", "seconds")
    return {name: a / b for name, (a, b) in wanted.items() if a and b}
