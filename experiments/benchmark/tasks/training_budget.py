"""The length of training of small models."""

from dataclasses import dataclass
from typing import Literal

from jaxblt.validation import check_bounds, check_fields

CHUNK = 50
"""Steps of a call, between two looks at the accuracy."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The budget that all models of a measurement share.

    Attributes:
      steps: at the most.
      learning_rate: the peak, after a tenth of the steps.
      weight_decay: of matrices.
      dtype: of the computation.
    """

    steps: int = 3000
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(self, "steps", least=CHUNK)
        check_bounds(self, "learning_rate", above=0)
        check_bounds(self, "weight_decay", least=0)
