"""Draws the figures of a split sequence: python -m experiments.benchmark draw FILES.json... --out FILE.png."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(sources: Annotated[tuple[str, ...], tyro.conf.Positional], out: str) -> None:
    """Draw bytes a second and planned memory of a device against the context, as `sequence_parallel` timed them.

    Lines of memory are what `sequence_plan` compiled without the GPUs, crosses the loss without gradients.

    Args:
      sources: JSON files of the benchmarks `sequence_parallel` and `sequence_plan`.
      out: picture to write, its format by its ending.

    Raises:
      FileNotFoundError: a file is not there.
      RuntimeError: matplotlib is missing.
      ValueError: no file holds a step that ran, or one holds no JSON.
    """
    if missing := [source for source in sources if not Path(source).is_file()]:
        raise FileNotFoundError(
            f"no file {', '.join(missing)}: `experiments.benchmark sequence_parallel --out FILE` writes one"
        )
    steps = [step for source in sources for step in _steps(Path(source))]
    if not any("seconds" in step for step in steps):
        raise ValueError(f"no step that ran in {', '.join(sources) or 'no file'}: give files with 'steps'")
    figure(steps).savefig(out, dpi=150)


def _steps(source: Path) -> list[dict[str, Any]]:
    """Return steps that ran, with the shares of single devices, those only planned, and losses without gradients."""
    try:
        written = json.loads(source.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} holds no JSON ({error}): `experiments.benchmark sequence_parallel --out FILE` writes some"
        ) from error
    found = [
        {"devices": plan["devices"], "bytes": plan["bytes"], "planned": plan["planned_bytes"]}
        for plan in written.get("plans", [])
    ]
    for step in written.get("steps", []):
        sides = {"all": (step["devices"], step["bytes"])}
        if "check" in step:
            sides["one_on_its_share"] = (1, step["check"]["bytes"])
        for side, (devices, length) in sides.items():
            if "seconds" in step[side]:
                seconds, planned = step[side]["seconds"]["median"], step[side]["planned_bytes"]
                found.append({"devices": devices, "bytes": length, "seconds": seconds, "planned": planned})
    for read in written.get("forward", []):
        if "seconds" in read["all"]:
            seconds = read["all"]["seconds"]["median"]
            found.append({"devices": read["devices"], "bytes": read["bytes"], "forward": seconds})
    return found


def figure(steps: list[dict[str, Any]]) -> "Figure":
    """Draw two panels over the context, a line for each number of devices."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("matplotlib is missing: pip install 'jaxblt[plot]'") from error
    drawn = Figure(figsize=(11, 3.6), layout="constrained")
    speed, memory = drawn.subplots(1, 2, sharex=True)
    for i, devices in enumerate(sorted({step["devices"] for step in steps})):
        chosen = sorted((s for s in steps if s["devices"] == devices), key=lambda s: s["bytes"])
        ran = [s for s in chosen if "seconds" in s]
        read = [s for s in chosen if "forward" in s]
        planned = [s for s in chosen if "seconds" not in s and "forward" not in s]
        style = {"color": f"C{i}", "label": f"{devices} GPU{'s' * (devices > 1)}"}
        if ran:
            speed.plot(
                [s["bytes"] for s in ran], [s["bytes"] / s["seconds"] / 1e3 for s in ran], "o-", **style
            )
        if read:
            forward = {"color": f"C{i}", "label": f"{style['label']}, loss alone"}
            speed.plot(
                [s["bytes"] for s in read], [s["bytes"] / s["forward"] / 1e3 for s in read], "x", **forward
            )
        memory.plot([s["bytes"] for s in planned], [s["planned"] / 1e9 for s in planned], "-", **style)
        memory.plot([s["bytes"] for s in ran], [s["planned"] / 1e9 for s in ran], "o", color=f"C{i}")
    for axes, title in (
        (speed, "thousand bytes a second, all GPUs"),
        (memory, "planned GB a GPU (points: where it ran)"),
    ):
        axes.set(xlabel="bytes of context", title=title)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(which="both", alpha=0.3)
    shown = {
        line.get_label(): line for axes in (memory, speed) for line in axes.get_legend_handles_labels()[0]
    }
    drawn.legend(handles=[shown[label] for label in sorted(shown)], loc="outside right")
    return drawn
