"""Sequence mixers: Hyena, attention, recurrences, memories; one contract (see `jaxblt.mixers.base`)."""

from jaxblt.mixers.attention import Attention, AttentionConfig
from jaxblt.mixers.base import MixerConfig, check_capacity, init_state
from jaxblt.mixers.cells import GRU, LSTM, GRUConfig, LSTMConfig
from jaxblt.mixers.dual_decay import DualDecay, DualDecayConfig
from jaxblt.mixers.filters import ExplicitFilter, ImplicitFilter, ModalFilter
from jaxblt.mixers.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from jaxblt.mixers.gated_linear_attention import GatedLinearAttention, GatedLinearAttentionConfig
from jaxblt.mixers.gated_memory import MAG, MAGConfig
from jaxblt.mixers.hyena import Hyena, HyenaConfig
from jaxblt.mixers.mamba2 import Mamba2, Mamba2Config
from jaxblt.mixers.memory_context import MAC, MACConfig
from jaxblt.mixers.neural_memory import NeuralMemory, NeuralMemoryConfig
from jaxblt.mixers.ntm import NTM, NTMConfig
from jaxblt.mixers.prepared import prepare
from jaxblt.mixers.recurrence import GatedRecurrence, GatedRecurrenceConfig
from jaxblt.mixers.slot_compression import reconstruction_error
from jaxblt.mixers.slot_memory import SlotMemory, SlotMemoryConfig
from jaxblt.mixers.slot_upkeep import SlotStats, memory_stats, reduce_slots
from jaxblt.mixers.state_engine import StateEngine, StateEngineConfig

__all__ = [
    "GRU",
    "LSTM",
    "MAC",
    "MAG",
    "NTM",
    "Attention",
    "AttentionConfig",
    "DualDecay",
    "DualDecayConfig",
    "ExplicitFilter",
    "GRUConfig",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "GatedLinearAttention",
    "GatedLinearAttentionConfig",
    "GatedRecurrence",
    "GatedRecurrenceConfig",
    "Hyena",
    "HyenaConfig",
    "ImplicitFilter",
    "LSTMConfig",
    "MACConfig",
    "MAGConfig",
    "Mamba2",
    "Mamba2Config",
    "MixerConfig",
    "ModalFilter",
    "NTMConfig",
    "NeuralMemory",
    "NeuralMemoryConfig",
    "SlotMemory",
    "SlotMemoryConfig",
    "SlotStats",
    "StateEngine",
    "StateEngineConfig",
    "check_capacity",
    "init_state",
    "memory_stats",
    "prepare",
    "reconstruction_error",
    "reduce_slots",
]
