"""Does a model answer what an objective asks: checks that objectives of labels make of a recipe."""

from typing import Any

from jaxblt.models.blt import BLTConfig
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.released_blt import ReleasedBLTConfig


def check_answers(recipe: Any, fitting: str = "LabellerConfig") -> None:
    """Check that a model does not answer with bytes where labels are asked for: logits would fit no target.

    Args:
      recipe: to check.
      fitting: configs of models that answer with such labels.

    Raises:
      ValueError: it is a language model.
    """
    objective, model = type(recipe.objective).__name__, recipe.model
    if isinstance(model, ByteLMConfig | BLTConfig | ReleasedBLTConfig):
        raise ValueError(
            f"objective {objective} asks for labels, and model {type(model).__name__} answers with bytes: use a "
            f"{fitting}, or NextByte"
        )


def check_classes(recipe: Any) -> None:
    """Check that a model has an output for each class that a label may be of: without one a loss would be NaN.

    Raises:
      ValueError: it has fewer.
    """
    classes = getattr(recipe.data, "num_classes", None)
    of_head = getattr(getattr(recipe.model, "head", None), "outputs", None)
    outputs = getattr(recipe.model, "num_classes", of_head)
    if classes is not None and outputs is not None and outputs < classes:
        name = "num_classes" if of_head is None else "head.outputs"
        raise ValueError(
            f"labels of data may be of {classes} classes, and model.{name} is {outputs}: set it to {classes}"
        )
