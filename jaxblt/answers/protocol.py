"""The members of a trained run that answers read, so that a run can offer answers without a circle of imports."""

from typing import Any, ClassVar, Protocol, runtime_checkable

import flax.linen as nn

from jaxblt.inference.decode import Decoder
from jaxblt.patching import PatcherConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.state import Frozen, Weights


@runtime_checkable
class TrainedRun(Protocol):
    """A dataclass with the members of `jaxblt.run.Run` that answers read; its docstring says what they are."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def recipe(self) -> Recipe: ...

    @property
    def params(self) -> Any: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def frozen(self) -> dict[str, Frozen]: ...

    @property
    def patcher(self) -> PatcherConfig | None: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def decoder(self) -> Decoder: ...

    @property
    def decoder_params(self) -> dict[str, Any]: ...
