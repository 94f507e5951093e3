"""Embeddings, positions, the byte-patch bridge, the stack, and the models made of them."""

from jaxblt.models.blt import BLT, BLTConfig
from jaxblt.models.blt_state import BLTState, init_blt_state
from jaxblt.models.byte_lm import ByteLM, ByteLMConfig, ByteLMState, init_byte_lm_state
from jaxblt.models.classifier import ByteClassifier, ByteClassifierConfig
from jaxblt.models.embeddings import ByteEmbedding, EmbeddingConfig, HashConfig
from jaxblt.models.label_head import LabelHead, LabelHeadConfig
from jaxblt.models.labeller import Labeller, LabellerConfig
from jaxblt.models.level import LevelConfig
from jaxblt.models.position_layers import PositionLayerConfig, with_positions
from jaxblt.models.positions import PositionConfig, SegmentAwarePosition
from jaxblt.models.protocol import LanguageModel, ModelConfig
from jaxblt.models.pulse import SimplePulse
from jaxblt.models.remat import Remat
from jaxblt.models.row_layout import RowLayout
from jaxblt.models.stack import (
    Stack,
    StackConfig,
    StackState,
    init_stack_state,
    stack_periods,
    unstack_periods,
    unstack_state,
)
from jaxblt.models.task_heads import TaskAnswers, TaskHead, TaskHeads, TaskHeadsConfig
from jaxblt.models.titan import titan
from jaxblt.models.word_features import WordsConfig

__all__ = [
    "BLT",
    "BLTConfig",
    "BLTState",
    "ByteClassifier",
    "ByteClassifierConfig",
    "ByteEmbedding",
    "ByteLM",
    "ByteLMConfig",
    "ByteLMState",
    "EmbeddingConfig",
    "HashConfig",
    "LabelHead",
    "LabelHeadConfig",
    "Labeller",
    "LabellerConfig",
    "LanguageModel",
    "LevelConfig",
    "ModelConfig",
    "PositionConfig",
    "PositionLayerConfig",
    "Remat",
    "RowLayout",
    "SegmentAwarePosition",
    "SimplePulse",
    "Stack",
    "StackConfig",
    "StackState",
    "TaskAnswers",
    "TaskHead",
    "TaskHeads",
    "TaskHeadsConfig",
    "WordsConfig",
    "init_blt_state",
    "init_byte_lm_state",
    "init_stack_state",
    "stack_periods",
    "titan",
    "unstack_periods",
    "unstack_state",
    "with_positions",
]
