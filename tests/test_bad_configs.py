"""Bad values of every config, each met with one line that names class, field, value and what is expected."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblt.cli.plan import PlanConfig
from jaxblt.data import DataConfig, LabelledDataConfig, SourceConfig, TaskDataConfig
from jaxblt.data.kmers import KmerVocab
from jaxblt.data.label_tasks import LabelTask
from jaxblt.evaluation.tasks import (
    MQAR,
    Babi,
    Babilong,
    Copy,
    GapRecall,
    ListOps,
    ListOpsFiles,
    Parity,
    PatternMatching,
    RepeatCopy,
    TextLabels,
    TextPairs,
)
from jaxblt.inference import Decoder, SamplingConfig
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
    StateEngineConfig,
)
from jaxblt.mixers.filters import ModalFilter
from jaxblt.mixers.state_manager import StateManager
from jaxblt.models import (
    BLTConfig,
    ByteClassifierConfig,
    ByteLMConfig,
    LabelHeadConfig,
    LabellerConfig,
    StackConfig,
    TaskHead,
    TaskHeadsConfig,
)
from jaxblt.models.embeddings import EmbeddingConfig, HashConfig
from jaxblt.models.positions import PositionConfig
from jaxblt.parallel.layout import SequenceLayout
from jaxblt.parallel.mesh import MeshConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.objectives import (
    Classify,
    Masked,
    MultiTask,
    NextByte,
    OrderAgnostic,
    Regress,
    Span,
    TaskLoss,
)
from jaxblt.training.optimizers import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig
from jaxblt.training.recipe import Recipe, TrainConfig
from jaxblt.training.serialize import from_json, to_json

NAN, INF = float("nan"), float("inf")
BYTES = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern="R"))
GOOD: dict[type, dict[str, Any]] = {
    TrainConfig: {},
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
    KmerVocab: {},
    PatcherConfig: {},
    MeshConfig: {},
    SequenceLayout: {},
    SamplingConfig: {},
    Decoder: {"model": BYTES},
    HashConfig: {},
    EmbeddingConfig: {},
    PositionConfig: {},
    StackConfig: {},
    ByteLMConfig: {},
    ByteClassifierConfig: {},
    LabelHeadConfig: {},
    LabellerConfig: {"base": BYTES},
    TaskHead: {"name": "t"},
    TaskHeadsConfig: {"tasks": (TaskHead("t"),)},
    BLTConfig: {},
    AttentionConfig: {"dim": 64},
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
}
"""Every config class, with what it needs to be made."""

SETS = {"train_size": (0, 2.5), "eval_size": (0, 2.5), "sets_seed": (-1, 0.5, 2**32)}
"Bad sizes and seeds of every task whose examples are drawn."
HEADS = {
    "dim": (0, 2.5, 63),
    "num_heads": (0, 2.5, 7),
    "num_key_heads": (0, 3, 2.5),
    "head_dim": (0, 2.5),
    "value_head_dim": (0, 2.5),
    "short_taps": (0, 2.5),
    "causal": (False, 1),
    "chunk_size": (0, 48, 2.5),
}
"Of mixers with a matrix of state per head."

MEMORY = {
    "dim": (0, 2.5, 63),
    "num_heads": (0, 7, 2.5),
    "head_dim": (0, 2.5),
    "depth": (0, 3, 1.5),
    "expand": (0, 2.5),
    "chunk_size": (0, 2.5),
    "short_taps": (0, 2.5),
    "causal": (False, 1),
    "packed": (1,),
    "segment_alignment": (0, 2.5),
}
"Of memories that learn while they read."

OPTIMIZER: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.0, -1e-3, NAN, INF, "1e-3"),
    "schedule": ("step",),
    "warmup_steps": (-1, 1.5),
    "decay_steps": (0, 2.5),
    "decay_share": (0.0, 1.1, NAN),
    "floor": (-0.1, 1.1, NAN),
    "weight_decay": (-1, NAN),
    "decay_embeddings": (1, "yes"),
    "clip_norm": (0.0, NAN, -1.0),
    "layer_decay": (0.0, 1.5, NAN),
    "rates": ((("*/router/*", 0.0),), (("*", INF),), (("*",),), ("*", 2.0)),
}
"""Of all optimisers."""

BAD: dict[type, dict[str, tuple[Any, ...]]] = {
    SourceConfig: {
        "name": ("", "a/b", 3),
        "weight": (0.0, -1.0, NAN, INF, "1"),
        "kind": ("fastq",),
        "soft_mask": ("drop",),
    },
    TrainConfig: {
        "sample_bytes": (-1, 2.5),
        "trackers": (("mlflow",), "jsonl"),
        "ema": (0.0, 1.0, -0.1, NAN, "0.9"),
        "steps": (0, -5, 2.5, True, "10", NAN, 10**10),
        "accumulate": (0, 1.5),
        "seed": (-1, 0.5, 2**32),
        "dtype": ("float16", 16),
        "log_every": (0, 2.0),
        "eval_every": (-1,),
        "eval_batches": (0, 1.5),
        "checkpoint_every": (0, -200),
        "keep_best": (-1, 1.5),
        "patience": (0, 1.5),
        "keep": (1, 2.5),
        "max_skips": (0,),
        "max_overflow": (-0.1, 1.5, NAN),
        "time_limit_s": (0.0, -1, NAN, INF, "1h"),
        "checkpoint_every_s": (0.0, -1, NAN, INF, "1h"),
        "profile_steps": ((4, 3), (1,), (-1, 3), 5, (1.5, 2)),
        "compilation_cache": (3,),
    },
    AdamWConfig: OPTIMIZER | {"b1": (2, 1.0, -0.1, NAN), "b2": (2, NAN), "eps": (-1, 0.0, NAN)},
    LionConfig: OPTIMIZER | {"b1": (1.0, -0.1), "b2": (2,)},
    AdafactorConfig: OPTIMIZER | {"decay_rate": (0.0, 1.5), "least_factored": (1, 2.5)},
    MuonConfig: OPTIMIZER | {"b1": (2,), "b2": (2,), "eps": (-1,), "momentum": (1.0, -0.1, NAN)},
    Classify: {"label_smoothing": (-0.1, 1.0, NAN)},
    Masked: {"rate": (0.0, 1.0, NAN), "hidden": (-0.1, 1.5), "swapped": (NAN,)},
    Regress: {"center": (NAN, "0"), "scale": (0.0, -1, INF)},
    Span: {"rate": (1.5,), "max_length": (0, 2.5)},
    DataConfig: {
        "paths": (["a.txt"], (3,)),
        "sample": ("boook", 3),
        "kind": ("csv",),
        "soft_mask": ("lower",),
        "seq_len": (0, -1, 2.5, True, 2**31),
        "batch_size": (0, 2.5),
        "packing": ("best",),
        "stride": (0, 1.5),
        "partial": ("cut",),
        "length_schedule": ((8,), ((2, 8.0),), ((2, 12),), [(2, 8)]),
        "context": (-1, 4096, 1.5),
        "alignment": (0, 2.5),
        "buckets": ((0,), (1.5,), [8]),
        "max_tokens": (0, 4095, 1.5),
        "long_documents": ("drop",),
        "eos": (1,),
        "reverse_complement": ("no",),
        "split": ("random",),
        "fractions": ((0.9, 0.2, 0.1), (0.5, 0.5), (-0.1, 0.6, 0.5), (NAN, 0.5, 0.5)),
        "split_seed": (-1,),
        "seed": (-1, 1.5),
    },
    LabelledDataConfig: {
        "paths": ((), "a.csv"),
        "target": ("text",),
        "classes": (("a", "a"), ("",)),
        "seq_len": (0, 2.5),
        "batch_size": (0, 2.5),
        "buckets": ((0,), (1.5,), [8]),
        "max_tokens": (0, 1023, 1.5),
        "split": ("random",),
        "group_k": (0, 2.5),
        "group_share": (0.0, 1.5),
        "validation_paths": (("a.csv",),),
        "easy_first": (-1, 1.5),
        "tasks": (("kind",), LabelTask("kind")),
        "difficulty": (3, "hard"),
        "fractions": ((0.9, 0.2, 0.1), (0.5, 0.5), (NAN, 0.5, 0.5)),
        "split_seed": (-1,),
        "seed": (-1, 1.5),
    },
    TaskDataConfig: {
        "task": (None, "copy", Copy),
        "seq_len": (0, 8, 2.5),
        "batch_size": (0, 2.5),
        "buckets": ((0,), (1.5,), [8]),
        "max_tokens": (0, 63, 1.5),
        "seed": (-1, 1.5),
        "labels": ("byte", True),
    },
    MQAR: SETS
    | {"symbols": (1, 15, 2.5), "pairs": (0, 17, 2.5), "positions": (2, 31, 33), "power": (0.0, 1.5, NAN)},
    GapRecall: SETS
    | {
        "symbols": (1, 2.5),
        "fillers": (1, 2.5),
        "pairs": (0, 33, 2.5),
        "min_gap": (0, 65, 2.5),
        "gap": (0, 2.5),
    },
    Copy: SETS | {"symbols": (1, 2.5), "min_symbols": (0, 21, 1.5), "max_symbols": (0, 2.5)},
    RepeatCopy: SETS
    | {"symbols": (1, 2.5), "min_symbols": (0, 11), "max_symbols": (0, 2.5), "max_repeats": (0, 1.5)},
    PatternMatching: SETS | {"symbols": (1, 2.5), "text": (0, 2.5), "pattern": (0, 1, 65, 2.5)},
    Parity: SETS | {"min_bits": (0, 33, 1.5), "max_bits": (0, 2.5), "prefixes": (1,)},
    ListOps: SETS
    | {
        "max_depth": (1, 2.5),
        "max_args": (1, 2.5),
        "min_symbols": (3, 2000, 2.5),
        "max_symbols": (3, 2.5),
    },
    ListOpsFiles: {"path": (None, 3), "max_symbols": (0, 2.5), "orders": (0, 2.5)},
    Babi: {"path": (3,), "subset": (None,), "tasks": ((), (0,), (21,), (1, 1), [1]), "max_words": (0, 2.5)},
    Babilong: {
        "path": (3,),
        "books": (3,),
        "subset": (None,),
        "task": (0, 21, 2.5),
        "min_bytes": (0, 2.5),
        "max_bytes": (0, 512, 2.5),
        "eval_size": (0, 2.5),
    },
    TextLabels: {
        "path": (3,),
        "labels": (("a",), ("a", "a"), ["a", "b"]),
        "max_bytes": (0, 2.5),
        "split_seed": (-1, 1.5),
    },
    TextPairs: {"path": (3,), "max_bytes": (0, 2.5)},
    KmerVocab: {"k": (0, 2.5, 10**9), "stride": (0, 4, 1.5), "alphabet": (b"", b"AA", "ACGT")},
    PatcherConfig: {
        "mode": ("bpe",),
        "threshold": (NAN, INF, "high"),
        "threshold_add": (NAN,),
        "monotonic": (1,),
        "patch_size": (0, 4.5),
        "patch_cost": (-1.0, NAN),
        "min_length": (0, 5000),
        "max_length": (0, 5000, 8.5),
        "block_size": (0, 4096.0),
        "capacity": (0, 5000, 2.5),
        "margin": (-1e-6, NAN),
        "entropy_context": (0, 17, 2.5),
    },
    MeshConfig: {"data": (0, -2), "fsdp": (0, 1.5), "seq": (2.5, True), "tensor": ("2",)},
    SequenceLayout: {"kind": ("spiral",)},
    SamplingConfig: {"temperature": (-1, NAN, INF), "top_k": (-1, 2.5), "top_p": (0.0, 1.5, NAN)},
    Decoder: {"model": (None, "books"), "patcher": ("space",)},
    HashConfig: {
        "sizes": ((), (1,), (3.5,), [3], (10**6,)),
        "table_size": (0, 2.5, 10**9),
        "functions": (0, 10**6),
    },
    EmbeddingConfig: {"dim": (0, 2.5), "vocab_size": (100,)},
    PositionConfig: {"offset_periods": ((0,), (2.5,)), "periods": ((-3,), 8)},
    StackConfig: {
        "dim": (0, 2.5),
        "num_layers": (0, 2.5, 10**6),
        "pattern": ("", "HX", 5),
        "mlp_dim": (-1, 2.5),
        "dropout": (-0.1, 1.5, 1.0, NAN),
        "causal": (1,),
        "mixers": (None, {"Z": 3}, {5: HyenaConfig(dim=8)}, (("Z", HyenaConfig(dim=8)),)),
        "remat": ("some",),
        "scan": ("yes",),
        "norm_epsilon": (0.0, NAN),
    },
    ByteClassifierConfig: {
        "stack": (None, 3),
        "num_classes": (1, 2.5),
        "pooling": ("max",),
        "vocab_size": (256,),
    },
    ByteLMConfig: {"stack": (None, 3), "vocab_size": (256, 260.0), "tie_head": (1,)},
    BLTConfig: {
        "look_back": (1, 2.5),
        "bridge_heads": (0, 3, 2.5),
        "vocab_size": (10,),
        "encoder": (None,),
        "hash": (3,),
    },
    AttentionConfig: {
        "dim": (0, 2.5, -64),
        "num_heads": (0, -1, 2.5, 7),
        "num_kv_heads": (0, 3),
        "head_dim": (0, 7, 2.5),
        "window": (0, 2.5),
        "position": ("sine",),
        "rope_theta": (0.0, NAN),
        "rope_scale": (-1.0, NAN),
        "context_parallel": ("ulysses",),
        "layout": ("spiral",),
        "implementation": ("fast",),
    },
    HyenaConfig: {
        "dim": (0, 2.5),
        "order": (1, 2.5, 10**6),
        "short_taps": (0,),
        "segment_alignment": (0, 1.5),
        "filter": (None, "modal"),
        "implementation": ("cudnn",),
    },
    GatedRecurrenceConfig: {"dim": (0, 2.5), "causal": (False, 1), "cell": ("lstm",)},
    GRUConfig: {"dim": (0, 2.5), "num_heads": (0, 2.5, 7), "causal": (False, 1)},
    LSTMConfig: {"dim": (0, 2.5), "num_heads": (0, 2.5, 7), "causal": (False, 1)},
    NTMConfig: {
        "dim": (0, 2.5),
        "num_heads": (0, 2.5),
        "slots": (2, 2.5),
        "width": (0, 2.5),
        "causal": (False, 1),
    },
    GatedDeltaNetConfig: HEADS | {"allow_negative_eigenvalues": (1,)},
    GatedLinearAttentionConfig: HEADS | {"gate_rank": (0, 2.5)},
    Mamba2Config: {
        "dim": (0, 2.5, 63),
        "expand": (0, 2.5),
        "head_dim": (0, 60, 2.5),
        "state_dim": (0, 2.5),
        "num_groups": (0, 3, 2.5),
        "short_taps": (0, 2.5),
        "step_sizes": ((0.0, 1.0), (0.5, 0.1), (NAN, 1.0), (0.1,)),
        "causal": (False, 1),
        "chunk_size": (0, 48),
    },
    DualDecayConfig: {"dim": (0, 63), "num_heads": (0, 7, 2.5), "causal": (False, 1), "chunk_size": (0, 48)},
    StateEngineConfig: {
        "dim": (0, 63, 2.5),
        "num_heads": (0, 7, 2.5),
        "num_slots": (0, 2.5),
        "levels": ((0, 4), (2.5,), 8),
        "head_dim": (0, 2.5),
        "top_k_states": (0, 17, 2.5),
        "cell": ("rnn",),
        "interval": (0, 2.5),
        "state_attention": (1,),
        "state_routes": (1,),
        "adaptive_count": (1,),
        "balance_weight": (-0.1, NAN),
        "count_weight": (-0.1, NAN),
        "short_taps": (0, 2.5),
        "causal": (False, 1),
        "packed": (1,),
        "segment_alignment": (0, 2.5),
        "chunk_size": (0, 48, 2.5),
    },
    NeuralMemoryConfig: MEMORY,
    MACConfig: MEMORY | {"persistent": (0, 2.5)},
    MAGConfig: MEMORY | {"window": (0, 63, 2.5)},
    SlotMemoryConfig: {
        "dim": (0, 2.5, 63),
        "num_heads": (0, 7, 2.5),
        "head_dim": (0, 2.5),
        "slots": (0, 2.5),
        "interval": (0, 2.5),
        "ratio": (0.0, 1.5, NAN),
        "adaptive_error": (0.0, 1.0, NAN),
        "rate": (-0.1, 1.0, NAN),
        "novelty": (-1.5, 1.5, NAN),
        "balance": (-0.1, NAN),
        "usage_decay": (-0.1, 1.0, NAN),
        "top_k": (0, 65, 2.5),
        "prune_below": (-0.1, NAN),
        "prune_after": (-1, 2.5),
        "short_taps": (0, 2.5),
        "causal": (False, 1),
        "packed": (1,),
        "segment_alignment": (0, 2.5),
    },
    StateManager: {"decay": (-0.1, 1, NAN), "threshold": (-0.1, 1, NAN)},
    ModalFilter: {"modes": (0, 2.5), "min_timescale": (0.0, NAN, 1e9), "max_timescale": (-1.0, INF)},
    ImplicitFilter: {
        "filter_len": (0, 2.5),
        "reference_len": (0,),
        "emb_dim": (2, 4, 2.5),
        "width": (0,),
        "inner_layers": (-1, 10**6),
        "sine_freq": (0.0, NAN),
        "fast": (0.0, 9.0),
        "slow": (NAN,),
        "target": (0.0, 1.0),
    },
    ExplicitFilter: {"taps": (0, 2.5)},
    Recipe: {
        "name": ("", "a/b", 3),
        "model": (None, 3, StackConfig),
        "data": (None,),
        "objective": ("next",),
        "entropy_model": (3,),
        "bytes_per_patch": (0.5, NAN),
        "patcher": ("space",),
    },
    LabelHeadConfig: {
        "target": ("text",),
        "outputs": (0, 1, 2.5),
        "pool": ("median",),
        "dropout": (1.0, -0.1, NAN),
    },
    LabellerConfig: {"base": (None, 3), "head": (None, "mean")},
    LabelTask: {"column": ("", "a/b", 3), "target": ("positions",), "classes": (("a", "a"), ("",))},
    TaskHead: {"name": ("", "a/b", "log_variances"), "head": (None, "mean")},
    TaskHeadsConfig: {"tasks": ((), ("t",))},
    TaskLoss: {"weight": (-1.0, NAN, INF), "objective": (None, NextByte())},
    MultiTask: {"tasks": ((), 3), "weighting": ("learned",), "causal": (False,)},
    PlanConfig: {"context": (0, -1), "memory_gb": (0.0, NAN), "longest": (1,)},
}
CASES = [
    pytest.param(kind, field, value, id=f"{kind.__name__}-{field}-{value!r:.40}")
    for kind, fields in BAD.items()
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("kind", "field", "value"), CASES)
def test_a_bad_value_is_named_in_one_line(kind: type, field: str, value: Any) -> None:
    with pytest.raises(ValueError) as error:
        kind(**(GOOD[kind] | {field: value}))
    said = str(error.value)
    assert "\n" not in said
    assert field in said
    assert shown(value) in said, "the message does not show the value"
    assert len(said) < 400


def shown(value: Any) -> str:
    """What a message shows of a value at least: for a tuple, what is wrong in it."""
    if isinstance(value, tuple) and value:
        return str(value[0])[:20]
    return value if isinstance(value, str) else repr(value)[:20]


def test_the_table_names_every_config_and_is_long_enough() -> None:
    assert set(BAD) <= set(GOOD)
    assert len(CASES) >= 150


def test_every_number_of_every_config_stands_in_the_table() -> None:
    numbers = {
        (kind, field.name)
        for kind in BAD
        for field in dataclasses.fields(kind)
        if any(name in str(field.type) for name in ("int", "float"))
    }
    assert {(k.__name__, f) for k, f in numbers if f not in BAD[k]} == {("PatcherConfig", "num_patches")}


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**12), 10**12),
    st.floats(),
    st.sampled_from(["", "x", b"x", (), (1,), (1.5, NAN), ["H"], {}, 10**400, BYTES, StackConfig, object()]),
)


NEVER_STORED = (Decoder, KmerVocab)
"""They hold a dtype and bytes; no recipe holds them."""


@settings(max_examples=400)
@given(data=st.data())
def test_any_value_of_any_field_is_refused_clearly_or_kept_in_json(data: st.DataObject) -> None:
    """Annotations are off here, as wherever `pytest.raises` stands."""
    kind = data.draw(st.sampled_from([kind for kind in GOOD if dataclasses.fields(kind)]))
    field = data.draw(st.sampled_from([field.name for field in dataclasses.fields(kind)]))
    value = data.draw(VALUES)
    made, said = None, ""
    try:
        made = kind(**(GOOD[kind] | {field: value}))
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    if made is not None and kind not in NEVER_STORED:
        assert from_json(to_json(made)) == made


@pytest.mark.parametrize("kind", GOOD)
def test_what_the_fuzz_starts_from_is_good(kind: type) -> None:
    """And what `pytest.raises` would refuse is not refused for another reason."""
    kind(**GOOD[kind])
