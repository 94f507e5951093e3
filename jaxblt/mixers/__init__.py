"""Sequence mixers: Hyena, attention, a gated recurrence; one contract (see `jaxblt.mixers.base`)."""

from jaxblt.mixers.attention import Attention, AttentionConfig
from jaxblt.mixers.base import MixerConfig, check_capacity, init_state
from jaxblt.mixers.filters import ExplicitFilter, ImplicitFilter, ModalFilter
from jaxblt.mixers.hyena import Hyena, HyenaConfig
from jaxblt.mixers.recurrence import GatedRecurrence, GatedRecurrenceConfig

__all__ = [
    "Attention",
    "AttentionConfig",
    "ExplicitFilter",
    "GatedRecurrence",
    "GatedRecurrenceConfig",
    "Hyena",
    "HyenaConfig",
    "ImplicitFilter",
    "MixerConfig",
    "ModalFilter",
    "check_capacity",
    "init_state",
]
