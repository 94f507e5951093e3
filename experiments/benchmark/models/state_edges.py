"""State engines whose slots move at edges, as benchmarks name them."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxblt.mixers import StateEngineConfig


def with_edges(engine: "StateEngineConfig") -> "StateEngineConfig":
    """Return the engine with all that an edge may do, every 64 tokens, for rows of one document."""
    return replace(engine, cell="gru", state_attention=True, state_routes=True, packed=False)
