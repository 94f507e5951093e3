"""Pictures of answers: logos of attributions and motifs, and heat maps of all substitutions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxblt.answers.attributions import Attributions
from jaxblt.answers.mutagenesis import Mutagenesis
from jaxblt.answers.reports.motifs import Motif
from jaxblt.patching.figure import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"A": "#2e8b57", "C": "#2b5fb3", "G": "#e0a100", "T": "#c0392b", "U": "#c0392b"}
"""Of bases; other letters are grey."""
PER_LINE = 100
"""Letters of a line of a picture."""
MOST_LINES = 24
"""Lines of a picture; what is behind them is left out, and the title says so."""


def draw_letter(axis: "Axes", letter: str, left: float, bottom: float, height: float) -> None:
    """Draw a letter one unit wide from `bottom` up; below it, upside down, where `height` is negative."""
    from matplotlib.patches import PathPatch
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), letter, size=1)
    box = path.get_extents()
    fit = Affine2D().translate(-box.x0, -box.y0).scale(0.95 / box.width, height / box.height)
    shape = fit.translate(left, bottom).transform_path(path)
    axis.add_patch(PathPatch(shape, color=COLOURS.get(letter.upper(), "#777777"), linewidth=0))


def plot_attributions(found: Attributions, record: int = 0) -> "Figure":
    """Plot a record's letters as high as their attributions, below the line where they are negative.

    Args:
      found: from `run.attributions`.
      record: its number.
    """
    sequence, values = found.sequences[record], np.nan_to_num(found.values[record])
    lines = _lines(len(sequence))
    figure, axes = _figure(len(lines), f"attributions of {found.names[record]}", len(sequence), 1.6)
    top = max(float(np.abs(values).max(initial=0)), 1e-9)
    for axis, (first, last) in zip(axes, lines, strict=True):
        for t in range(first, last):
            if values[t]:
                draw_letter(axis, chr(sequence[t]), t - first, 0, float(values[t]))
        axis.axhline(0, color="black", linewidth=0.5)
        _frame(axis, first, 1.05 * min(float(values.min(initial=0)), -0.02 * top), 1.05 * top)
    return figure


def plot_mutagenesis(found: Mutagenesis, record: int = 0) -> "Figure":
    """Plot a record's effects as a heat map, letters by positions: red where a substitution lowers the answer.

    Dots mark the record's own letters.

    Args:
      found: from `run.mutagenesis`.
      record: its number.
    """
    sequence, effects = found.sequences[record], np.nan_to_num(found.effects[record])
    lines, letters = _lines(len(sequence)), list(found.alphabet)
    figure, axes = _figure(
        len(lines), f"substitutions of {found.names[record]}", len(sequence), 0.6 + 0.2 * len(letters)
    )
    top = max(float(np.abs(effects).max(initial=0)), 1e-9)
    for axis, (first, last) in zip(axes, lines, strict=True):
        extent = (0, last - first, len(letters) - 0.5, -0.5)
        axis.imshow(effects[first:last].T, cmap="RdBu", vmin=-top, vmax=top, aspect="auto", extent=extent)
        own = [(t - first + 0.5, letters.index(chr(b))) for t, b in _known(sequence, letters, first, last)]
        axis.plot(*zip(*own, strict=True) if own else ((), ()), "k.", markersize=2)
        axis.set_yticks(range(len(letters)), letters, fontsize=7)
        _frame(axis, first, len(letters) - 0.5, -0.5)
    figure.colorbar(axes[0].images[0], ax=list(axes), shrink=0.8, label="gain")
    return figure


def plot_motifs(motifs: Sequence[Motif]) -> "Figure":
    """Plot the logo of each motif: letters as high as their share of a place's information, in bits.

    Raises:
      ValueError: there is no motif.
    """
    if not motifs:
        raise ValueError("there is no motif to plot: find_motifs found none")
    figure = new_figure(figsize=(6, 1.8 * len(motifs)), layout="constrained")
    for axis, motif in zip(figure.subplots(len(motifs), 1, squeeze=False)[:, 0], motifs, strict=True):
        heights = motif.pwm * np.maximum(motif.bits, 0)[:, None]
        for place, row in enumerate(heights):
            bottom = 0.0
            for letter in np.argsort(row):
                if row[letter] > 0.01:
                    draw_letter(axis, motif.alphabet[letter], place, bottom, float(row[letter]))
                bottom += float(row[letter])
        axis.set(xlim=(0, len(heights)), ylim=(0, max(2.0, float(heights.sum(1).max()))), ylabel="bits")
        axis.set_xticks(np.arange(len(heights)) + 0.5, range(1, len(heights) + 1))
        axis.set_title(f"{motif.consensus}, {len(motif.sites)} sites", fontsize=9)
    return figure


def _known(sequence: bytes, letters: list[str], first: int, last: int) -> list[tuple[int, int]]:
    return [(t, sequence[t]) for t in range(first, last) if chr(sequence[t]) in letters]


def _lines(length: int) -> list[tuple[int, int]]:
    starts = range(0, max(length, 1), PER_LINE)[:MOST_LINES]
    return [(start, min(start + PER_LINE, length)) for start in starts]


def _figure(lines: int, title: str, length: int, height: float) -> tuple["Figure", Sequence["Axes"]]:
    figure = new_figure(figsize=(14, 0.5 + height * lines), layout="constrained")
    drawn = lines * PER_LINE
    figure.suptitle(title if length <= drawn else f"{title}, the first {drawn:,} of {length:,}", fontsize=10)
    return figure, list(figure.subplots(lines, 1, squeeze=False)[:, 0])


def _frame(axis: "Axes", first: int, bottom: float, top: float) -> None:
    axis.set(xlim=(0, PER_LINE), ylim=(bottom, top))
    marks = np.arange(0, PER_LINE, 10)
    axis.set_xticks(marks + 0.5, marks + first + 1, fontsize=7)
