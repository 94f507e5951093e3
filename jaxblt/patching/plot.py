"""A picture of byte entropies and the patches made of them."""

from typing import TYPE_CHECKING

import numpy as np

from jaxblt.patching.figure import new_figure
from jaxblt.patching.patches import Patches
from jaxblt.patching.render import label_byte, patch_spans

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
    ids, entropies = np.asarray(ids), np.asarray(entropies, np.float32)
    if ids.shape != (patches.num_bytes,) or entropies.shape != ids.shape:
        raise ValueError(
            f"ids and entropies must be one row of {patches.num_bytes}, got {ids.shape}, {entropies.shape}"
        )
    lines = -(-len(ids) // bytes_per_line)
    figure = new_figure(figsize=(16, 0.6 + 1.9 * lines), layout="constrained")
    axes = figure.subplots(lines, 1, squeeze=False)[:, 0]
    spans = patch_spans(patches, row)
    top = 1.1 * max(float(entropies.max(initial=0.0)), threshold or 0.0, 0.1)
    for line, axis in enumerate(axes):
        left = line * bytes_per_line
        _draw_line(axis, ids, entropies, spans, (left, left + bytes_per_line), top)
        if threshold is not None:
            axis.axhline(threshold, color="tab:red", linewidth=0.8, linestyle="--")
    label = "" if threshold is None else f", threshold {threshold:.4g}"
    figure.suptitle(f"Entropy of each byte given those before it (nats{label}); {len(spans)} patches")
    return figure


def _draw_line(
    axis: "Axes",
    ids: np.ndarray,
    entropies: np.ndarray,
    spans: list[tuple[int, int]],
    window: tuple[int, int],
    top: float,
) -> None:
    left, right = window
    shown = np.arange(left, min(right, len(ids)))
    predicted = shown[shown > 0]
    for number, (start, length) in enumerate(spans):
        if start < right and start + length > left:
            axis.axvspan(
                start - 0.5, start + length - 0.5, color="tab:blue" if number % 2 else "white", alpha=0.08
            )
            axis.axvline(start - 0.5, color="tab:gray", linewidth=0.8)
    axis.plot(predicted, entropies[predicted - 1], color="tab:blue", marker=".", markersize=4, linewidth=1)
    axis.set(xlim=(left - 0.5, right - 0.5), ylim=(0, top), ylabel="nats")
    axis.set_xticks(shown)
    labels = axis.set_xticklabels(
        [label_byte(int(token)) for token in ids[shown]], family="monospace", fontsize=8
    )
    for text, token in zip(labels, ids[shown], strict=True):
        text.set_parse_math(False)
        if len(label_byte(int(token))) > 1:
            text.set_rotation(90)
