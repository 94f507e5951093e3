"""Pictures of byte entropies, or of a router's probabilities, and the patches made of them."""

from typing import TYPE_CHECKING

import numpy as np

from jaxblt.patching.figure import new_figure
from jaxblt.patching.patches import Patches
from jaxblt.patching.render import label_byte, patch_spans
from jaxblt.patching.rules import MIDDLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_entropies(
    ids: np.ndarray,
    entropies: np.ndarray,
    patches: Patches,
    threshold: float | None = None,
    *,
    row: int = 0,
    bytes_per_line: int = 80,
) -> "Figure":
    """Plot each byte's entropy in lines of text, with a rule wherever a patch starts.

    Above byte t stands entropies[t - 1], the entropy of the prediction of t: a byte above the threshold
    starts a patch.

    Args:
      ids: [bytes], byte + 4, the row that was patched.
      entropies: [bytes], nats, of the prediction made at each byte.
      patches: of the batch; patches of alternate parity are shaded.
      threshold: nats, drawn as a line.
      row: which row of the batch.
      bytes_per_line: of the picture. A passage of some hundred bytes stays readable.

    Returns:
      A figure that a notebook shows when it is a cell's last value.

    Raises:
      ValueError: ids and entropies are not one row of the patches' length.
    """
    entropies = np.asarray(entropies, np.float32)
    above = np.concatenate([np.full(1, np.nan, np.float32), entropies[:-1]])
    label = "" if threshold is None else f", threshold {threshold:.4g}"
    title = f"Entropy of each byte given those before it (nats{label})"
    top = 1.1 * max(float(entropies.max(initial=0.0)), threshold or 0.0, 0.1)
    axes = {"title": title, "ylabel": "nats", "top": top, "threshold": threshold}
    return _draw(np.asarray(ids), above, patches, row, bytes_per_line, **axes)


def plot_boundaries(
    ids: np.ndarray,
    probabilities: np.ndarray,
    patches: Patches,
    *,
    row: int = 0,
    bytes_per_line: int = 80,
) -> "Figure":
    """Plot a router's p above each byte in lines of text, with a rule wherever a patch starts.

    The patch of a byte whose p is above 1/2, the dashed line, ends there, unless limits refuse it.

    Args:
      ids: [bytes], byte + 4, the row that was patched.
      probabilities: [bytes], as `model.apply(..., method="route")` returns them.
      patches: of the batch; patches of alternate parity are shaded.
      row: which row of the batch.
      bytes_per_line: of the picture.

    Returns:
      A figure that a notebook shows when it is a cell's last value.

    Raises:
      ValueError: ids and probabilities are not one row of the patches' length.
    """
    axes = {"title": "Probability that a patch ends at each byte", "ylabel": "p", "top": 1.05}
    above = np.asarray(probabilities, np.float32)
    return _draw(np.asarray(ids), above, patches, row, bytes_per_line, **axes, threshold=MIDDLE)


def _draw(
    ids: np.ndarray,
    above: np.ndarray,
    patches: Patches,
    row: int,
    bytes_per_line: int,
    *,
    title: str,
    ylabel: str,
    top: float,
    threshold: float | None,
) -> "Figure":
    """Draw what stands above each byte; nothing where it is NaN."""
    if ids.shape != (patches.num_bytes,) or above.shape != ids.shape:
        raise ValueError(
            f"ids and what is drawn must be one row of {patches.num_bytes}, got {ids.shape}, {above.shape}"
        )
    lines = -(-len(ids) // bytes_per_line)
    figure = new_figure(figsize=(16, 0.6 + 1.9 * lines), layout="constrained")
    spans = patch_spans(patches, row)
    for line, axis in enumerate(figure.subplots(lines, 1, squeeze=False)[:, 0]):
        left = line * bytes_per_line
        _draw_line(axis, ids, above, spans, (left, left + bytes_per_line))
        axis.set(ylim=(0, top), ylabel=ylabel)
        if threshold is not None:
            axis.axhline(threshold, color="tab:red", linewidth=0.8, linestyle="--")
    figure.suptitle(f"{title}; {len(spans)} patches")
    return figure


def _draw_line(
    axis: "Axes",
    ids: np.ndarray,
    above: np.ndarray,
    spans: list[tuple[int, int]],
    window: tuple[int, int],
) -> None:
    left, right = window
    shown = np.arange(left, min(right, len(ids)))
    for number, (start, length) in enumerate(spans):
        if start < right and start + length > left:
            axis.axvspan(
                start - 0.5, start + length - 0.5, color="tab:blue" if number % 2 else "white", alpha=0.08
            )
            axis.axvline(start - 0.5, color="tab:gray", linewidth=0.8)
    drawn = shown[np.isfinite(above[shown])]
    axis.plot(drawn, above[drawn], color="tab:blue", marker=".", markersize=4, linewidth=1)
    axis.set(xlim=(left - 0.5, right - 0.5))
    axis.set_xticks(shown)
    labels = axis.set_xticklabels(
        [label_byte(int(token)) for token in ids[shown]], family="monospace", fontsize=8
    )
    for text, token in zip(labels, ids[shown], strict=True):
        text.set_parse_math(False)
        if len(label_byte(int(token))) > 1:
            text.set_rotation(90)
