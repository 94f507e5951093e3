"""Which documents the tokens of a batch are of: their own chunks in an index are no neighbours."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxblt.adapters.code.router import Router


def tell_documents(
    documents: Int[Array, "B T"] | None, block_size: int | None = None
) -> AbstractContextManager[Any]:
    """Make a context in which routers with an index leave out chunks of the document that a token is of.

    Whole rows alone are told: a call with a state decodes text that is no document of the index.

    Args:
      documents: key of each byte's document (`jaxblt.data.keys`); None leaves nothing out.
      block_size: bytes of a patcher's block, for a router whose tokens are slots of patches.
    """
    if documents is None:
        return nullcontext()

    def intercept(call: Any, args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if (
            not isinstance(module, Router)
            or context.method_name != "__call__"
            or options.get("state") is not None
        ):
            return call(*args, **options)
        told = of_slots(documents, args[0].shape[1], block_size)
        return call(*args, **{**options, "documents": told})

    return nn.intercept_methods(intercept)


def of_slots(documents: Int[Array, "B T"], slots: int, block_size: int | None) -> Int[Array, "B S"]:
    """Return the documents of a row's slots: a document begins at a block's edge, so all slots of a block have one."""
    length = documents.shape[1]
    if slots == length or block_size is None:
        return documents
    return jnp.repeat(documents[:, ::block_size], slots * block_size // length, axis=1)
