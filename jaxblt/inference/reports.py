"""Errors and warnings about rows that were generated, from what the programs counted."""

from typing import Any, Never

import numpy as np

from jaxblt.adapters.code.fallback import warn_replaced
from jaxblt.inference.decode import Decoder
from jaxblt.models.finite import explain_nonfinite
from jaxblt.patching import warn_overflow


def refuse_nonfinite(prompt: int, byte: int, length: int, params: dict[str, Any]) -> Never:
    """Raise for the logits of a byte, counted from 0 behind a prompt of `length` ids."""
    raise ValueError(
        f"logits are not finite: prompt {prompt}, byte {byte} after its {length - 1} bytes; "
        f"{explain_nonfinite(params)}"
    )


def warn_of_rows(
    decoder: Decoder, params: dict[str, Any], refused: tuple[Any, Any] | None, replaced: np.ndarray | None
) -> None:
    """Warn of boundaries that were refused and of codes that were replaced, if there are any.

    Args:
      decoder: of the rows.
      params: of the decoder.
      refused: patch boundaries refused and asked for, of all rows.
      replaced: tokens of each row whose code was not finite.
    """
    if decoder.patcher is not None and refused is not None:
        patcher, (over, wanted) = decoder.patcher, map(float, refused)
        warn_overflow(over, wanted, capacity=patcher.slots, block_size=patcher.block_size)
    if replaced is not None:
        warn_replaced(replaced, params)
