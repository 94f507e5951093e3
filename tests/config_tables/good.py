"""What every public config needs to be made."""

from typing import Any

from jaxblt.adapters import (
    AdapterConfig,
    AdapterLosses,
    ChunkMean,
    Clamp,
    Confidence,
    Draw,
    Ema,
    Governor,
    Mixed,
    Neighbours,
    Prefix,
    RecurrentMemory,
    RouterConfig,
    Side,
    Sparse,
    Sticky,
    TopK,
    Traces,
)
from jaxblt.adapters.code.experimental.guess import Guess
from jaxblt.adapters.experimental.capacity import Capacity
from jaxblt.adapters.experimental.diagonal import Diagonal
from jaxblt.adapters.experimental.film import Film
from jaxblt.adapters.experimental.kronecker import Kronecker
from jaxblt.adapters.experimental.quantized_codes import Codebook
from jaxblt.adapters.files.serving import Limits
from jaxblt.cli.benchmark import BenchmarkOptions
from jaxblt.cli.plan import PlanConfig
from jaxblt.data import DataConfig, LabelledDataConfig, SourceConfig, TaskDataConfig
from jaxblt.data.kmers import KmerVocab
from jaxblt.data.label_tasks import LabelTask
from jaxblt.data.tasks import (
    MQAR,
    Babi,
    Babilong,
    Copy,
    GapRecall,
    ListOps,
    ListOpsFiles,
    Parity,
    Pathfinder,
    PatternMatching,
    PixelClasses,
    RepeatCopy,
    TextLabels,
    TextPairs,
)
from jaxblt.inference import Decoder, Drafts, SamplingConfig
from jaxblt.inference.engine import EngineConfig, Lane, Request, Sampling
from jaxblt.mixers import (
    AttentionConfig,
    DualDecayConfig,
    ExplicitFilter,
    GatedDeltaNetConfig,
    GatedLinearAttentionConfig,
    GatedRecurrenceConfig,
    GRUConfig,
    HyenaConfig,
    ImplicitFilter,
    LSTMConfig,
    MACConfig,
    MAGConfig,
    Mamba2Config,
    NeuralMemoryConfig,
    NTMConfig,
    SlotMemoryConfig,
    SparseAttentionConfig,
    StateEngineConfig,
)
from jaxblt.mixers.hyena.filters import ModalFilter
from jaxblt.mixers.slots.experimental.state_manager import StateManager
from jaxblt.models import (
    BLTConfig,
    ByteClassifierConfig,
    ByteLMConfig,
    LabelHeadConfig,
    LabellerConfig,
    LevelConfig,
    StackConfig,
    TaskHead,
    TaskHeadsConfig,
)
from jaxblt.models.embeddings import EmbeddingConfig, HashConfig
from jaxblt.models.experimental.coded_turns import CodedTurnsConfig
from jaxblt.models.position_layers import PositionLayerConfig
from jaxblt.models.positions import PositionConfig
from jaxblt.models.released_blt import PolynomialHash, ReleasedBLTConfig
from jaxblt.models.word_features import WordsConfig
from jaxblt.parallel.experimental import Schedule
from jaxblt.parallel.layout import SequenceLayout
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.precision import Fp8Config, LossScaleConfig
from jaxblt.training.experimental.hybrid import HybridNextByte
from jaxblt.training.experimental.online import OnlineConfig
from jaxblt.training.experimental.policy import PolicyConfig
from jaxblt.training.objectives.objectives import (
    Classify,
    ClassifyChain,
    ClassifyPositions,
    Masked,
    MultiTask,
    NextByte,
    OrderAgnostic,
    Regress,
    Span,
    TaskLoss,
)
from jaxblt.training.objectives.reference import ReferenceConfig
from jaxblt.training.optimisers.by_optax import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig
from jaxblt.training.optimisers.schedule import ScheduleConfig
from jaxblt.training.recipe import Recipe
from jaxblt.training.train_config import TrainConfig

BYTES = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("recurrence",)))
GOOD: dict[type, dict[str, Any]] = {
    TrainConfig: {},
    Fp8Config: {},
    LossScaleConfig: {},
    AdamWConfig: {},
    LionConfig: {},
    AdafactorConfig: {},
    MuonConfig: {},
    Classify: {},
    Masked: {},
    Span: {},
    NextByte: {},
    OrderAgnostic: {},
    Regress: {},
    TaskLoss: {"name": "t", "objective": Classify()},
    MultiTask: {"tasks": (TaskLoss("t", Classify()),)},
    DataConfig: {},
    SourceConfig: {"name": "s"},
    LabelledDataConfig: {"paths": ("labelled.csv",)},
    LabelTask: {"column": "kind"},
    TaskDataConfig: {"task": Copy(), "seq_len": 64},
    MQAR: {},
    GapRecall: {},
    Copy: {},
    RepeatCopy: {},
    PatternMatching: {},
    Parity: {},
    ListOps: {},
    ListOpsFiles: {"path": "data"},
    Babi: {"path": "data"},
    Babilong: {"path": "data", "books": "books"},
    TextLabels: {"path": "data"},
    TextPairs: {"path": "data"},
    Pathfinder: {},
    PixelClasses: {"path": "data"},
    KmerVocab: {},
    PatcherConfig: {},
    BoundaryConfig: {},
    LevelConfig: {},
    MeshConfig: {},
    Schedule: {"stages": 2, "micro_batches": 4},
    SequenceLayout: {},
    Drafts: {},
    SamplingConfig: {},
    EngineConfig: {},
    Lane: {},
    Request: {"prompt": b""},
    Sampling: {},
    Decoder: {"model": BYTES},
    HashConfig: {},
    PolynomialHash: {},
    ReleasedBLTConfig: {},
    EmbeddingConfig: {},
    PositionConfig: {},
    StackConfig: {},
    ByteLMConfig: {},
    ByteClassifierConfig: {},
    LabelHeadConfig: {},
    WordsConfig: {},
    LabellerConfig: {"base": BYTES},
    TaskHead: {"name": "t"},
    TaskHeadsConfig: {"tasks": (TaskHead("t"),)},
    CodedTurnsConfig: {
        "base": ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("state_engine",)))
    },
    BLTConfig: {},
    PositionLayerConfig: {"dim": 64},
    AttentionConfig: {"dim": 64},
    SparseAttentionConfig: {"dim": 64},
    HyenaConfig: {"dim": 64},
    GatedRecurrenceConfig: {"dim": 64},
    GRUConfig: {"dim": 64},
    LSTMConfig: {"dim": 64},
    NTMConfig: {"dim": 64},
    GatedDeltaNetConfig: {"dim": 64},
    GatedLinearAttentionConfig: {"dim": 64},
    Mamba2Config: {"dim": 64},
    DualDecayConfig: {"dim": 64},
    StateEngineConfig: {"dim": 64},
    NeuralMemoryConfig: {"dim": 64},
    MAGConfig: {"dim": 64},
    MACConfig: {"dim": 64},
    SlotMemoryConfig: {"dim": 64},
    StateManager: {},
    ModalFilter: {},
    ImplicitFilter: {"filter_len": 64},
    ExplicitFilter: {},
    Recipe: {"name": "r", "model": BYTES, "data": DataConfig()},
    PlanConfig: {},
    BenchmarkOptions: {},
    ScheduleConfig: {},
    ClassifyPositions: {},
    ClassifyChain: {},
    HybridNextByte: {},
    OnlineConfig: {},
    PolicyConfig: {},
    ReferenceConfig: {},
    AdapterConfig: {},
    AdapterLosses: {},
    RouterConfig: {},
    ChunkMean: {},
    Prefix: {},
    Side: {"features": 2},
    Traces: {},
    RecurrentMemory: {},
    Neighbours: {},
    Mixed: {},
    Governor: {},
    Clamp: {},
    Confidence: {},
    Draw: {},
    Ema: {},
    Sparse: {},
    Sticky: {},
    Guess: {},
    TopK: {},
    Capacity: {},
    Codebook: {},
    Diagonal: {},
    Film: {},
    Kronecker: {},
    Limits: {},
}
"""Every config class, with what it needs to be made."""
