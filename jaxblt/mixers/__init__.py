"""Sequence mixers: Hyena, attention, recurrences, memories; one contract (see `jaxblt.mixers.base`)."""

from jaxblt.mixers.attention import Attention, AttentionConfig
from jaxblt.mixers.base import MixerConfig, check_capacity, init_state
from jaxblt.mixers.cells import GRU, LSTM, GRUConfig, LSTMConfig
from jaxblt.mixers.filters import ExplicitFilter, ImplicitFilter, ModalFilter
from jaxblt.mixers.hyena import Hyena, HyenaConfig
from jaxblt.mixers.ntm import NTM, NTMConfig
from jaxblt.mixers.recurrence import GatedRecurrence, GatedRecurrenceConfig

__all__ = [
    "GRU",
    "LSTM",
    "NTM",
    "Attention",
    "AttentionConfig",
    "ExplicitFilter",
    "GRUConfig",
    "GatedRecurrence",
    "GatedRecurrenceConfig",
    "Hyena",
    "HyenaConfig",
    "ImplicitFilter",
    "LSTMConfig",
    "MixerConfig",
    "ModalFilter",
    "NTMConfig",
    "check_capacity",
    "init_state",
]
