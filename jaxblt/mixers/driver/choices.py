"""Hard choices of a mixer (top-k, rounding) that a check can hold still while it compares gradients."""

import flax.linen as nn
from jaxtyping import Array, Shaped

COLLECTION = "choices"


def held(module: nn.Module, name: str, choice: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return `choice`, or the value that the collection "choices" holds for it.

    A hard choice has no derivative that differences could measure, and a step of theirs may flip it. Pass what is
    constant in the gradient through here: the indices of a top-k; of a straight-through estimator, what is added to the
    soft value, `stop_gradient(hard - soft)`. `check_mixer` then compares gradients at the choices of the unmoved point.

    Args:
      module: the mixer.
      name: of the choice within the module.
      choice: as decided from this call's inputs.
    """
    if (given := given_choice(module, name)) is not None:
        return given
    # Leave them out of what `init` returns: `apply` would hold its input's choices for every other input.
    if module.is_initializing():
        return choice
    module.sow(COLLECTION, name, choice, reduce_fn=lambda _, new: new, init_fn=lambda: choice)
    return choice


def given_choice(module: nn.Module, name: str) -> Shaped[Array, "..."] | None:
    """Return the value in the collection "choices", or None.

    For choices that are made where there is no module. Hand it to what chooses, and what was chosen to `held`
    afterwards.
    """
    return module.get_variable(COLLECTION, name) if module.has_variable(COLLECTION, name) else None
