"""Pictures for the run log: a passage's entropies and the patches that they cut it into; what a classifier confuses."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from jaxblt.data.dataset import Dataset
from jaxblt.parallel.rules import replicated
from jaxblt.patching import Patches, make_patches, plot_entropies
from jaxblt.training.log.runlog import Progress, RunLog
from jaxblt.training.start.setup import Setup, to_devices
from jaxblt.training.state import Frozen
from jaxblt.training.step import find_entropies
from jaxblt.training.stored.safe_files import replace_bytes

LENGTH = 400
"""Bytes of the passage, at most."""
NAME = "validation/patches"
MOST_CLASSES = 40
"""Of which a table of confusions can be read."""


@dataclass(frozen=True)
class Passage:
    """Bytes with their entropies and patches.

    Attributes:
      ids: [bytes].
      entropies: [bytes], nats, of the prediction made at each byte.
      patches: of the one row.
      threshold: nats above which a patch ends; None where the rule compares something else with it.
    """

    ids: np.ndarray
    entropies: np.ndarray
    patches: Patches
    threshold: float | None

    def png(self) -> bytes:
        """Return the picture, as the bytes of a PNG file."""
        picture = io.BytesIO()
        figure = plot_entropies(self.ids, self.entropies, self.patches, self.threshold)
        figure.savefig(picture, format="png", dpi=80)
        return picture.getvalue()


def first_passage(setup: Setup, frozen: Mapping[str, Frozen], data: Dataset) -> Passage | None:
    """Return the beginning of the first document of a split; None if no entropies cut the patches.

    Every process calls it, with the frozen trees on the devices of all, as in evaluation.
    """
    patcher = setup.task.patcher
    if patcher is None or not patcher.has_threshold:
        return None
    find = jax.jit(partial(find_entropies, setup.eval_task), out_shardings=replicated(setup.mesh))
    entropies = find(frozen, to_devices(data.batch(0), setup.mesh, data.config.batch_size))
    row = data.batch(0, slots=(0,))
    first = row.segment_ids[0] == 1
    ids, entropies = (np.asarray(x)[0, first][:LENGTH] for x in (row.inputs, entropies))
    patches = make_patches(patcher, jnp.asarray(ids)[None], entropies=jnp.asarray(entropies)[None])
    return Passage(ids, entropies, patches, patcher.threshold if patcher.mode == "entropy" else None)


def log_passage(log: RunLog, progress: Progress, step: int, passage: Passage) -> None:
    """Log the picture, or say what to install to have one."""
    if not log.is_main:
        return
    if find_spec("matplotlib") is None:
        progress.say("no picture of the patches: matplotlib is missing (pip install 'jaxblt[plot]')")
        return
    log.image(step, NAME, passage.png())


def draw_confusion(counts: np.ndarray, classes: tuple[str, ...]) -> bytes:
    """Draw rows by label and columns by prediction, with counts and each label's shares as colours, as a PNG."""
    from matplotlib.figure import Figure

    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = 2.5 + 0.5 * len(classes)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues")
    for (i, j), share in np.ndenumerate(shares):
        colour = "white" if share > 0.5 else "black"
        axes.text(j, i, f"{counts[i, j]:.0f}", ha="center", va="center", color=colour)
    # Draw names as they are: matplotlib reads what stands between two $ as a formula, and refuses a wrong one
    axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", parse_math=False)
    axes.set_yticks(range(len(classes)), classes, parse_math=False)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    figure.colorbar(image, label="share of the label's rows")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    return picture.getvalue()


def log_confusion(
    log: RunLog, progress: Progress, step: int, counts: np.ndarray, classes: tuple[str, ...], name: str
) -> None:
    """Log the picture and keep the newest in the run's folder, or say what to install to have one.

    It is called as the sum, "confusion" or "task/confusion"; the files are confusion.png and confusion_task.png.
    """
    classes = classes or tuple(map(str, range(len(counts))))
    if not log.is_main or len(classes) > MOST_CLASSES:
        return
    if find_spec("matplotlib") is None:
        progress.say("no picture of the confusions: matplotlib is missing (pip install 'jaxblt[plot]')")
        return
    png = draw_confusion(counts, classes)
    log.image(step, f"validation/{name}", png)
    task = name.rpartition("/")[0]
    replace_bytes(log.run_dir / f"confusion{'_' if task else ''}{task}.png", png)
