"""Pictures of a model that reads a passage: its memories, routes of state engines, or weights of attention.

    picture = plot_memory(jaxblt.load("runs/titan"), b"The key is 4711. ...", out="runs/titan/memory")

writes `memory.png` and `memory.json`, which hold equal values. `jaxblt memory RUN_DIR FILE` does it on a command line.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import flax.linen as nn
import numpy as np

from jaxblt.outputs import whole_file, write_text
from jaxblt.profiling.memory_passage import TABLES, Shown, Trained, read_passage
from jaxblt.validation import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "validation/memory"
"""The name of the picture in a run log."""
SPELT = 80
"""Bytes of a row of the picture, and the most that slots' axes spell out."""
LEAST = {"usage": 0.1, "age": 1.0, "reads": 0.1, "routes": 0.1, "weights": 0.1}
"""End of a colour scale, at least."""
LEGEND = {
    "usage": "usage",
    "age": "age, intervals since a write",
    "reads": "weight of reads",
    "routes": "share of writes",
    "weights": "weight of each key, by query",
}
PANELS = {"slots": TABLES, "state engine": ("routes", "reads"), "attention": ("weights",)}
"""The tables of a kind of layer, in the order of the picture."""


@runtime_checkable
class ImageLog(Protocol):
    """A taker of pictures: a run log or one of its trackers."""

    def image(self, step: int, name: str, png: bytes) -> None: ...


@dataclass(frozen=True, eq=False)
class MemoryPicture:
    """A figure and the values that it shows.

    Attributes:
      figure: of matplotlib; a notebook shows it when it is a cell's last value. An artist that shows a series has
        "<layer>/<series>" as its gid.
      values: see `jaxblt.profiling.memory_passage.read_passage`.
    """

    figure: "Figure"
    values: dict[str, Any]

    @cached_property
    def png(self) -> bytes:
        """The figure, as the bytes of a PNG file."""
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png", dpi=80)
        return picture.getvalue()

    def write(self, out: str | Path) -> tuple[Path, Path]:
        """Write `out`.png and `out`.json, each whole or not at all, and return their paths."""
        files = Path(f"{out}.png"), Path(f"{out}.json")
        with whole_file(files[0]) as partial:
            partial.write_bytes(self.png)
        write_text(files[1], json.dumps(self.values) + "\n")
        return files

    def _repr_png_(self) -> bytes:
        return self.png


def plot_memory(
    model: nn.Module | Trained,
    passage: bytes | np.ndarray,
    *,
    params: Any = None,
    labels: Sequence[str] | None = None,
    what: Shown = "memory",
    out: str | Path | None = None,
    log: ImageLog | None = None,
    step: int | None = None,
) -> MemoryPicture:
    """Draw a model's memories while they read a passage, and write picture and values.

    A layer with a neural memory has means over heads by byte. They are the surprise |f_M(k) - v|^2 / 2 with the memory
    M that the byte reads, the length |M|, and alpha, the share that the byte asks to forget. M changes at the end of a
    chunk. A layer with slots has, by slot of each head, the usage and age of the slots that an interval's bytes read,
    and the weight with which each byte reads each slot. Usage and age of free slots are blank. Routing shows where
    each byte writes and reads in the slots of state engines, attention the weight of each key for each query.

    Args:
      model: a run, or a model over bytes.
      passage: bytes, which BOS is put in front of, or ids. It is read as the beginning of a document.
      params: of the model; those of the run by default.
      labels: a word for each id of the passage, BOS included; None for its bytes.
      what: memories, routing of state engines, or attention.
      out: path of the files without ".png" and ".json"; None writes none.
      log: a run log or tracker that takes the picture too, under `NAME`.
      step: under which it is logged; None for the run's, or 0.

    Raises:
      ValueError: a model without parameters, without a memory, or with patches; or a passage of no byte, of text or
        of ids beyond the vocabulary, or labels that do not fit it; or what its memories do is not finite.
      ModuleNotFoundError: matplotlib is missing (pip install 'jaxblt[plot]').
    """
    if step is not None:
        whole("step", step, least=0)
    values = read_passage(model, passage, params, labels, what)
    picture = MemoryPicture(draw(values), values)
    if out is not None:
        picture.write(out)
    if log is not None:
        log.image(getattr(model, "step", 0) if step is None else step, NAME, picture.png)
    return picture


def draw(values: dict[str, Any]) -> "Figure":
    """Draw the figure of what `read_passage` found."""
    from jaxblt.patching.figure import new_figure

    learned = [layer for layer in values["layers"] if layer["kind"] == "neural memory"]
    tabled = [(layer, name) for layer in values["layers"] for name in PANELS.get(layer["kind"], ())]
    lines = -(-len(values["labels"]) // SPELT) if learned else 0
    heights = [1.9] * lines + [1.6] * (2 if learned else 0)
    heights += [2.2 * (layer["heads"] if name == "weights" else 1) for layer, name in tabled]
    figure = new_figure(figsize=(16, 0.6 + sum(heights)), layout="constrained")
    axes = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    for line in range(lines):
        _draw_surprise(next(axes), learned, values["labels"], line * SPELT)
    if learned:
        _draw_course(next(axes), learned, "norm", "length of M")
        _draw_course(next(axes), learned, "alpha", "alpha")
    for layer, name in tabled:
        _draw_table(next(axes), layer, name, values["labels"])
    figure.suptitle(f"What layers do under a passage of {len(values['labels'])} bytes")
    return figure


def _draw_surprise(axis: "Axes", layers: list[dict[str, Any]], labels: list[str], left: int) -> None:
    """Draw a line of text with the surprise of each layer above it."""
    shown = range(left, min(left + SPELT, len(labels)))
    top = max(max(layer["surprise"]) for layer in layers)
    for layer in layers:
        curve = layer["surprise"][shown.start : shown.stop]
        axis.plot(
            shown, curve, marker=".", markersize=4, linewidth=1, gid=_gid(layer, "surprise"), label=_of(layer)
        )
        # Draw a rule where the memory has changed.
        for edge in range(
            -(-max(left, 1) // layer["chunk_size"]) * layer["chunk_size"], shown.stop, layer["chunk_size"]
        ):
            axis.axvline(edge - 0.5, color="tab:gray", linewidth=0.5, alpha=0.5)
    axis.set(xlim=(left - 0.5, left + SPELT - 0.5), ylim=(0, 1.1 * top or 1), ylabel="surprise")
    _spell(axis, shown, labels)
    if not left:
        axis.legend(loc="upper right", ncols=4)


def _draw_course(axis: "Axes", layers: list[dict[str, Any]], name: str, said: str) -> None:
    """Draw one number a byte over the whole passage, by layer."""
    for layer in layers:
        curve = layer[name]
        axis.plot(
            range(len(curve)),
            curve,
            linewidth=1,
            drawstyle="steps-mid",
            gid=_gid(layer, name),
            label=_of(layer),
        )
    axis.set(xlim=(-0.5, len(layers[0][name]) - 0.5), xlabel="byte", ylabel=said)


def _draw_table(axis: "Axes", layer: dict[str, Any], name: str, labels: list[str]) -> None:
    """Draw a table as an image: slots by bytes or intervals, or queries by keys."""
    table = np.ma.masked_invalid(np.array(layer[name], float))  # None becomes NaN, and NaN a blank
    span = layer["interval"] if name in ("usage", "age") else 1
    extent = (-0.5, table.shape[1] * span - 0.5, len(table) - 0.5, -0.5)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "none", "cmap": "viridis", "vmin": 0}
    options["vmax"] = max(float(table.max()) if table.count() else 0.0, LEAST[name])
    image = axis.imshow(table, extent=extent, gid=_gid(layer, name), **options)
    axis.set(
        xlim=(-0.5, len(labels) - 0.5),
        ylabel="query" if name == "weights" else "slot",
        title=f"{_of(layer)}: {LEGEND[name]}",
    )
    for head in range(1, layer["heads"]):
        axis.axhline(head * len(table) / layer["heads"] - 0.5, color="white", linewidth=0.8)
    if len(labels) <= SPELT:
        _spell(axis, range(len(labels)), labels)
    axis.figure.colorbar(image, ax=axis)


def _spell(axis: "Axes", shown: range, labels: list[str]) -> None:
    """Write bytes below the axis."""
    axis.set_xticks(shown)
    texts = axis.set_xticklabels([labels[i] for i in shown], family="monospace", fontsize=8)
    for text in texts:
        text.set_parse_math(False)
        if len(text.get_text()) > 1:
            text.set_rotation(90)


def _gid(layer: dict[str, Any], name: str) -> str:
    return f"{layer['layer']}/{name}"


def _of(layer: dict[str, Any]) -> str:
    return f"layer {layer['layer']}"
