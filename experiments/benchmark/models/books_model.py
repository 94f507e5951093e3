"""The model of `books` as benchmarks of one long sequence run it."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import configs

if TYPE_CHECKING:
    from jaxblt.models import BLTConfig

Remat = Literal["none", "full", "dots"]


def split_model(pattern: str, remat: Remat, recipe: str = "books") -> "BLTConfig":
    """Return the model of a recipe with this latent pattern; scanned, as XLA then lays out fewer blocks at a time.

    Its mixers are promised one document a row.
    """
    from jaxblt.models.row_layout import RowLayout, promise

    model = promise(configs.get(recipe).model, RowLayout(packed=False))
    names = ("encoder", "latent", "decoder")
    stacks = {name: replace(getattr(model, name), remat=remat, scan=True) for name in names}
    stacks["latent"] = replace(stacks["latent"], pattern=pattern)
    return replace(model, **stacks)
