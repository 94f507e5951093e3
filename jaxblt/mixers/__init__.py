"""Sequence mixers: Hyena, attention, recurrences with a state of one size; one contract (see `jaxblt.mixers.base`)."""

from jaxblt.mixers.attention import Attention, AttentionConfig
from jaxblt.mixers.base import MixerConfig, check_capacity, init_state
from jaxblt.mixers.dual_decay import DualDecay, DualDecayConfig
from jaxblt.mixers.filters import ExplicitFilter, ImplicitFilter, ModalFilter
from jaxblt.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from jaxblt.mixers.gated_linear_attention import GatedLinearAttention, GatedLinearAttentionConfig
from jaxblt.mixers.hyena import Hyena, HyenaConfig
from jaxblt.mixers.mamba2 import Mamba2, Mamba2Config
from jaxblt.mixers.recurrence import GatedRecurrence, GatedRecurrenceConfig

__all__ = [
    "Attention",
    "AttentionConfig",
    "DualDecay",
    "DualDecayConfig",
    "ExplicitFilter",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLinearAttention",
    "GatedLinearAttentionConfig",
    "GatedRecurrence",
    "GatedRecurrenceConfig",
    "Hyena",
    "HyenaConfig",
    "ImplicitFilter",
    "Mamba2",
    "Mamba2Config",
    "MixerConfig",
    "ModalFilter",
    "check_capacity",
    "init_state",
]
