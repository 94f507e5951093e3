"""The methods that an objective has, for one of your own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, PRNGKeyArray

from jaxblt.data.batch import Batch


@runtime_checkable
class OwnObjective(Protocol):
    """An objective that this library does not have: a frozen dataclass with these methods.

    It may inherit scores (`IdScores`, `LabelScores`, ...) and write `__call__` alone. Besides methods it has

    - `causal`: whether the model must not see the future;
    - `headline` and `higher_is_better`: the figure to show first and how it compares;
    - `figure_names`: what evaluations may be compared by;
    - optionally `any_order = True`, if it does not matter where in a row a byte lies;
    - optionally `check(recipe)`, which raises ValueError for a recipe that the objective does not suit.
    """

    if (
        TYPE_CHECKING
    ):  # Keep attributes out of the program: `issubclass`, which tyro asks, refuses protocols with them.

        @property
        def causal(self) -> bool: ...

        @property
        def headline(self) -> str: ...

        @property
        def higher_is_better(self) -> bool: ...

        @property
        def figure_names(self) -> tuple[str, ...]: ...

    def __call__(self, key: PRNGKeyArray, batch: Batch) -> Batch:
        """Return the batch that the model is asked."""
        ...

    def answered(self, logits: Any, batch: Batch) -> Float[Array, "B"] | float:
        """Return the share of prices that modules sowed which each row pays, such as 1."""
        ...

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Return what the loss is divided by."""
        ...

    def sums(self, logits: Any, batch: Batch) -> dict[str, Any]:
        """Return sums over a batch, "loss" and "weight" among them."""
        ...

    def figures(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """Return figures of sums, `headline` among them."""
        ...
