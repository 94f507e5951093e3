"""Images as rows of bytes: Pathfinder of 32, 128 and 256 pixels a side, and CIFAR-10 in grey.

`jaxblt data fetch pathfinder` draws the images of one. data/cifar10_gray holds train_x.npy, train_y.npy,
test_x.npy and test_y.npy: UInt8[images, 32, 32] and the classes.
"""

from dataclasses import replace

from jaxblt.data.task_data import TaskDataConfig
from jaxblt.data.tasks import PixelClasses
from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import ByteClassifierConfig, StackConfig
from jaxblt.training.objectives.objectives import Classify
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

REACH = 3
"""Rows that a filter sees up and down, and columns to the left and right."""


def _classifier(
    columns: int, dim: int, layers: int, classes: int, *, dropout: float = 0.0, row_norm: bool = False
) -> ByteClassifierConfig:
    """Return gated convolutions over an image whose rows have so many tokens."""
    taps = REACH * columns + REACH + 1
    rows = HyenaConfig(dim=dim, filter=ExplicitFilter(taps=taps, columns=columns))
    stack = StackConfig(
        dim=dim,
        num_layers=layers,
        pattern=("rows",),
        mixers={"rows": rows},
        dropout=dropout,
        causal=False,
        row_norm=row_norm,
    )
    return ByteClassifierConfig(stack=stack, num_classes=classes)


def _recipe(
    name: str,
    model: ByteClassifierConfig,
    task: PixelClasses,
    *,
    steps: int,
    optimizer: AdamWConfig,
    batch_size: int = 128,
) -> Recipe:
    return Recipe(
        name=name,
        model=model,
        data=TaskDataConfig(task=task, seq_len=task.side**2, batch_size=batch_size, labels="symbol"),
        objective=Classify(causal=False),
        optimizer=replace(optimizer, warmup_steps=steps // 20, floor=0.02),
        train=TrainConfig(
            steps=steps,
            log_every=100,
            eval_every=steps // 8,
            eval_batches=8,
            checkpoint_every=steps // 2,
            keep_best=1,
        ),
    )


def pathfinder() -> Recipe:
    """Train to tell whether two discs lie on one contour; each training image is shown in its eight symmetries.

    Two in five training images have shorter contours, of 2 to 12 segments. Others, and the other splits, have 14.
    """
    return _path("pathfinder", 32, squares=2, steps=26_000)


def path_x() -> Recipe:
    """Train the same on 128 x 128 pixels, rows of 16,384 bytes. Nobody has trained it to the end."""
    return _path("path_x", 128, squares=4, steps=20_000, batch_size=32)


def path_256() -> Recipe:
    """Train the same on 256 x 256 pixels, rows of 65,536 bytes. Nobody has trained it to the end."""
    return _path("path_256", 256, squares=8, steps=40_000, batch_size=32)


def _path(name: str, side: int, *, squares: int, steps: int, batch_size: int = 128) -> Recipe:
    """Return a model that reads squares of pixels, whose channels are normalised over the image.

    Norms of each square would make black as loud as ink, and nothing would be learned.
    """
    task = PixelClasses(path=f"data/{name}", side=side, classes=2, views=8, symmetries="square")
    optimizer = AdamWConfig(learning_rate=4e-3, weight_decay=0.05)
    model = _classifier(side // squares, 64, 12, 2, row_norm=True)
    model = replace(model, levels=True, squares=squares, columns=side)
    return _recipe(name, model, task, steps=steps, optimizer=optimizer, batch_size=batch_size)


def cifar10_gray() -> Recipe:
    """Train the ten classes of CIFAR-10 in grey; training images are mirrored, and moved by up to four pixels."""
    task = PixelClasses(path="data/cifar10_gray", views=64, shift=4, symmetries="mirror")
    optimizer = AdamWConfig(learning_rate=2e-3, weight_decay=0.1)
    # Of the periods those up to 32 tell the column, and the others the row
    periods = tuple(2**n for n in range(1, 11))
    model = replace(_classifier(32, 96, 6, 10, dropout=0.1), periods=periods)
    return _recipe("cifar10_gray", model, task, steps=2500, optimizer=optimizer)
