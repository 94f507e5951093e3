"""The models that adapters are tried on."""

from typing import TYPE_CHECKING, Any

from jaxblt.models import ByteLMConfig
from jaxblt.models.row_layout import RowLayout
from jaxblt.training.flops import count_params
from jaxblt.training.state import content_hash

if TYPE_CHECKING:
    from jaxblt import Run


def model_of(run: "Run") -> ByteLMConfig:
    """Return a run's model for rows of one document each.

    Raises:
      ValueError: the model is none of bytes.
    """
    model = run.recipe.model
    if not isinstance(model, ByteLMConfig):
        raise ValueError(f"the base is a {type(model).__name__}, expected a ByteLMConfig: use books_512")
    apart = RowLayout(packed=False)
    return model.in_rows(apart, apart)


def describe(run: "Run") -> dict[str, Any]:
    """Return which run it is, by its parameters' content hash, for the figures."""
    found = {"run": run.recipe.name, "step": run.step, "parameters": count_params(run.params)[0]}
    return found | {"content_hash": content_hash(run.params)}
