"""An engine that decodes many requests together: lanes of rows, a scheduler, prompts in pieces, a prefix cache."""

from jaxblt.inference.engine.config import EngineConfig, Lane, Piece, Request, Sampling
from jaxblt.inference.engine.engine import Engine, Stats
from jaxblt.inference.engine.memory import LaneShrunkWarning
from jaxblt.inference.engine.schedule import Refused, Scheduler
from jaxblt.inference.engine.stream import Stream

__all__ = [
    "Engine",
    "EngineConfig",
    "Lane",
    "LaneShrunkWarning",
    "Piece",
    "Refused",
    "Request",
    "Sampling",
    "Scheduler",
    "Stats",
    "Stream",
]
