"""Rows of pixels: the recipe's model beside a CNN, a linear classifier and the majority, each a number of seconds.

python -m experiments.benchmark pixels --task pathfinder --out FILE
"""

from dataclasses import replace
from typing import Any, Literal

Task = Literal["pathfinder", "path_x", "path_256", "cifar10_gray"]
Model = Literal["recipe", "cnn", "linear"]


def pixels(
    out: str,
    task: Task = "pathfinder",
    path: str | None = None,
    seconds: float = 110.0,
    baseline_seconds: float = 15.0,
    models: tuple[Model, ...] = ("recipe", "cnn", "linear"),
    ramp: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Train a recipe's model and two simpler ones on images, and score all on the test split.

    Training steps are those of the recipe, except that the learning rate goes by the clock: a run ends when its time is
    up. The images lie on the device.

    Args:
      out: file for the figures as JSON, written anew after each model.
      task: a recipe on images.
      path: folder of the arrays; None for the recipe's.
      seconds: of training of the recipe's model, after its compilation.
      baseline_seconds: of each of the others.
      models: to train.
      ramp: share of the seconds in which images with more ink join as those before are mastered; Pathfinder's have the
        longer contours.
      seed: of parameters, batches and views.

    Raises:
      FileNotFoundError: the folder lacks an array.
      ValueError: `ramp` is no share.
    """
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.intervals import wilson
    from experiments.benchmark.figures.saved import save
    from experiments.benchmark.tasks.pixel_models import LinearPixels, cnn_of_size
    from experiments.benchmark.tasks.pixel_training import Shown, Training, accuracy, fit
    from jaxblt import recipes
    from jaxblt.training.flops import count_params
    from jaxblt.validation import number

    number("--ramp", ramp, least=0, most=1)
    recipe: Any = recipes.get(task)
    source = recipe.data.task if path is None else replace(recipe.data.task, path=path)
    opened = {split: source.open(split) for split in ("train", "validation", "test")}
    shown = {split: Shown.of(images) for split, images in opened.items()}
    training = Training(recipe.optimizer, recipe.data.batch_size, source.shift, source.symmetries, ramp)
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else recipe.train.dtype)
    model = recipe.model.build(dtype=dtype)
    size = count_params(
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, source.length), jnp.int32))
    )
    known: dict[str, tuple[Any, float]] = {
        "recipe": (model, seconds),
        "cnn": (cnn_of_size(size[0], source.classes, dtype), baseline_seconds),
        "linear": (LinearPixels(source.classes), baseline_seconds),
    }
    figures: dict[str, Any] = {
        "task": task,
        "ramp": ramp,
        "images": {split: len(images.labels) for split, images in shown.items()},
        "majority": _majority(opened),
        "models": {},
    }
    for name in models:
        module, given = known[name]
        params, told = fit(module, shown["train"], training, given, jax.random.key(seed))
        scores = {split: accuracy(module, params, shown[split]) for split in ("validation", "test")}
        asked = len(shown["test"].labels)
        low, high = wilson(round(scores["test"] * asked), asked)
        figures["models"][name] = {**told, **scores, "low": low, "high": high}
        print(f"{name}: {scores}, {told['images']:,} images in {told['seconds']:.0f} s", flush=True)
        save("pixels", out, figures)
    return figures


def _majority(opened: dict[str, Any]) -> float:
    """Return the share of test images of the class that most training images have."""
    import numpy as np

    commonest = np.bincount(opened["train"].labels).argmax()
    return float(np.mean(opened["test"].labels == commonest))
