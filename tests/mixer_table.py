"""The table of a stack from one config for each family of mixers."""

import dataclasses
from typing import Any

from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig


def table(
    *,
    hyena: HyenaConfig | None = None,
    attention: AttentionConfig | None = None,
    window: int = 512,
    **named: Any,
) -> dict[str, Any]:
    """H, S, M of a Hyena with filters of its own, 7 and 128 taps; A, W of attention; and what is named besides."""
    found = dict(named)
    if hyena is not None:
        found["H"] = hyena
        found |= {
            c: dataclasses.replace(hyena, filter=ExplicitFilter(taps=n)) for c, n in (("S", 7), ("M", 128))
        }
    if attention is not None:
        found |= {"A": attention, "W": dataclasses.replace(attention, window=window)}
    return found
