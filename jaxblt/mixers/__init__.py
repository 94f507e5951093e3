"""Sequence mixers: Hyena, attention, recurrences, memories; one contract (see `jaxblt.mixers.driver.base`)."""

from jaxblt.mixers.attention.attention import Attention, AttentionConfig
from jaxblt.mixers.attention.sparse import SparseAttention, SparseAttentionConfig
from jaxblt.mixers.cells.cells import GRU, LSTM, GRUConfig, LSTMConfig
from jaxblt.mixers.cells.experimental.ntm import NTM, NTMConfig
from jaxblt.mixers.driver.base import MixerConfig, check_capacity, init_state
from jaxblt.mixers.driver.keep import call_keeping, keep_first
from jaxblt.mixers.driver.prepared import prepare
from jaxblt.mixers.hyena.filters import ExplicitFilter, ImplicitFilter, ModalFilter
from jaxblt.mixers.hyena.hyena import Hyena, HyenaConfig
from jaxblt.mixers.linear.dual_decay import DualDecay, DualDecayConfig
from jaxblt.mixers.linear.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from jaxblt.mixers.linear.gated_linear_attention import GatedLinearAttention, GatedLinearAttentionConfig
from jaxblt.mixers.linear.mamba2 import Mamba2, Mamba2Config
from jaxblt.mixers.linear.recurrence import GatedRecurrence, GatedRecurrenceConfig
from jaxblt.mixers.memory.gated_memory import MAG, MAGConfig
from jaxblt.mixers.memory.memory_context import MAC, MACConfig
from jaxblt.mixers.memory.neural_memory import NeuralMemory, NeuralMemoryConfig
from jaxblt.mixers.slots.experimental.slot_compression import reconstruction_error
from jaxblt.mixers.slots.experimental.slot_memory import SlotMemory, SlotMemoryConfig
from jaxblt.mixers.slots.experimental.slot_upkeep import SlotStats, memory_stats, reduce_slots
from jaxblt.mixers.slots.state_engine import StateEngine, StateEngineConfig

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
    "SparseAttention",
    "SparseAttentionConfig",
    "StateEngine",
    "StateEngineConfig",
    "call_keeping",
    "check_capacity",
    "init_state",
    "keep_first",
    "memory_stats",
    "prepare",
    "reconstruction_error",
    "reduce_slots",
]
