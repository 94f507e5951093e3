"""Values of one field that a config refuses, beside those that no field of their type takes."""

from typing import Any

from jaxblt.adapters import Clamp, Prefix
from jaxblt.adapters.experimental.film import Film
from jaxblt.data.tasks import Copy
from jaxblt.mixers import ExplicitFilter, HyenaConfig
from jaxblt.models import StackConfig
from tests.config_tables.good import by_class

NAN, INF = float("nan"), float("inf")
Fields = dict[str, tuple[Any, ...]]


SETS: Fields = {"sets_seed": (2**32,)}
"Seeds of every task whose examples are drawn."
HEADS: Fields = {
    "dim": (63,),
    "num_heads": (7,),
    "num_key_heads": (3,),
    "causal": (False,),
    "chunk_size": (48,),
}
"Of mixers with a matrix of state per head."
MEMORY: Fields = {"dim": (63,), "num_heads": (7,), "depth": (3,), "causal": (False,)}
"Of memories that learn while they read."
OPTIMIZER: Fields = {
    "decay_share": (1.1,),
    "floor": (1.1,),
    "layer_decay": (1.5,),
    "rates": ((("*/router/*", -0.1),), (("*", INF),)),
}
"Of all optimisers."

VALUES: dict[str, Fields] = {
    "AdapterConfig": {"forms": ((("mlp/down", 3),), (("", Film()),)), "blocks": (2,), "code": ((Clamp(),),)},
    "Codebook": {"entries": (1,)},
    "Film": {"factor": (1.5,)},
    "RouterConfig": {"reads": (("prefix",), (Prefix,), (Prefix(2), Prefix(3))), "fallback": (0.5,)},
    "Neighbours": {"capacity": (7,), "count": (16385,)},
    "Mixed": {"levels": (("chunk",), ("token", "chunk")), "at": ((1.0,),), "prices": ((0.1,),)},
    "Governor": {
        "start": (9.0,),
        "most": (0.5,),
        "low": (0.5,),
        "high": (1.5,),
        "shrink": (1.0,),
        "grow": (1.0,),
    },
    "Confidence": {"start": (1.0,)},
    "Ema": {"decay": (1.0,)},
    "Sticky": {"tau": (1.0,)},
    "Guess": {"tau": (-1.5, 1.5)},
    "Limits": dict.fromkeys(("most_flips", "least_hits", "most_violations"), (1.5,)),
    "SourceConfig": {"name": ("a/b",)},
    "DataConfig": {
        "sample": ("boook",),
        "seq_len": (2**31,),
        "length_schedule": (((2, 12),), ((2, 8), (2, 16)), ((2, 16), (3, 8)), ((0, 8),), ((2, 4096),)),
        "context": (4096,),
        "max_tokens": (4095,),
        "fractions": ((0.9, 0.2, 0.1), (-0.1, 0.6, 0.5), (NAN, 0.5, 0.5)),
    },
    "LabelledDataConfig": {
        "classes": (("a", "a"),),
        "max_tokens": (1023,),
        "group_share": (1.5,),
        "validation_paths": (("a.csv",),),
        "difficulty": ("hard",),
        "fractions": ((0.9, 0.2, 0.1), (NAN, 0.5, 0.5)),
    },
    "TaskDataConfig": {"task": (None, "copy", Copy), "seq_len": (8,), "max_tokens": (63,)},
    "MQAR": SETS | {"symbols": (1, 15), "pairs": (17,), "positions": (2, 31, 33), "power": (1.5,)},
    "GapRecall": SETS | {"symbols": (1,), "fillers": (1,), "pairs": (33,), "min_gap": (65,)},
    "Copy": SETS | {"symbols": (1,), "min_symbols": (21,)},
    "RepeatCopy": SETS | {"symbols": (1,), "min_symbols": (11,)},
    "PatternMatching": SETS | {"symbols": (1,), "pattern": (1, 65)},
    "Parity": SETS | {"min_bits": (33,)},
    "ListOps": SETS | {"max_depth": (1,), "max_args": (1,), "min_symbols": (3, 2000), "max_symbols": (3,)},
    "ListOpsFiles": {"orders": (1025,)},
    "Babi": {"tasks": ((21,), (1, 1))},
    "Babilong": {"task": (21,), "max_bytes": (512,)},
    "TextLabels": {"labels": (("a",), ("a", "a"))},
    "Pathfinder": SETS
    | {
        "size": (7, 28, 1025),
        "contours": ((1,),),
        "paddle_length": (7,),
        "paddle_thickness": (0.3,),
        "margins": ((6,),),
        "seed_distance": (2, 8),
    },
    "PixelClasses": {
        "side": (1025,),
        "classes": (1, 257),
        "views": (4097,),
        "shift": (4, 32),
        "symmetries": ("mirror",),
    },
    "KmerVocab": {"k": (10**9,), "stride": (4,), "alphabet": (b"", b"AA")},
    "PatcherConfig": {
        "patch_size": (8,),
        "patch_cost": (2.0,),
        "min_length": (5000,),
        "max_length": (5000,),
        "capacity": (5000,),
        "entropy_context": (17,),
        "target": (4.5,),
        "reads_entropies": (True,),
    },
    "BoundaryConfig": {
        "motifs": (("TATAAT",),),
        "learned_motifs": (8,),
        "motif_length": (65, 6),
        "codon_phase": (True,),
        "parts": (("entropy_based",),),
    },
    "LabelTask": {"column": ("a/b",), "classes": (("a", "a"),)},
    "Drafts": {"count": (17,), "order": (17,)},
    "SamplingConfig": {"temperature": (1e-40, 9e-7, 1.1e6), "top_p": (1e-40, 1.01)},
    "EngineConfig": {"beams": (257,)},
    "Lane": {"slots": (10**6,), "capacity": (1,)},
    "Sampling": {
        "top_p": (1.5,),
        "seed": (2**70,),
        "stop": ((b"",),),
        "alphabet": (b"",),
        "frequency_penalty": (1e6,),
        "presence_penalty": (-1e6,),
    },
    "AttentionConfig": {"num_heads": (7,), "num_kv_heads": (3,), "head_dim": (7,)},
    "SparseAttentionConfig": {
        "num_heads": (7,),
        "num_kv_heads": (3,),
        "head_dim": (7,),
        "block": (513,),
        "window": (63,),
    },
    "HyenaConfig": {"order": (1, 10**6), "filter": (ExplicitFilter(groups=3),)},
    "GatedRecurrenceConfig": {"causal": (False,)},
    "GRUConfig": {"num_heads": (7,), "causal": (False,)},
    "LSTMConfig": {"num_heads": (7,), "causal": (False,)},
    "NTMConfig": {"slots": (2,), "causal": (False,)},
    "GatedDeltaNetConfig": HEADS,
    "GatedLinearAttentionConfig": HEADS,
    "Mamba2Config": {
        "dim": (63,),
        "head_dim": (60,),
        "num_groups": (3,),
        "step_sizes": ((0.0, 1.0), (0.5, 0.1), (NAN, 1.0)),
        "causal": (False,),
        "chunk_size": (48,),
    },
    "DualDecayConfig": {"dim": (63,), "num_heads": (7,), "causal": (False,), "chunk_size": (48,)},
    "StateEngineConfig": {
        "dim": (63,),
        "num_heads": (7,),
        "levels": ((0, 4),),
        "top_k_states": (17,),
        "gathered": (True,),
        "interval": (4,),
        "count_weight": (0.5,),
        "causal": (False,),
        "chunk_size": (48,),
    },
    "NeuralMemoryConfig": MEMORY,
    "MACConfig": MEMORY,
    "MAGConfig": MEMORY | {"window": (63,)},
    "SlotMemoryConfig": {
        "dim": (63,),
        "num_heads": (7,),
        "ratio": (1.5,),
        "adaptive_error": (1.0,),
        "rate": (1.0,),
        "novelty": (-1.5, 1.5),
        "usage_decay": (1.0,),
        "top_k": (65,),
        "prune_after": (5,),
        "causal": (False,),
    },
    "StateManager": {"decay": (1,), "threshold": (1,)},
    "ModalFilter": {"min_timescale": (1e9,)},
    "ImplicitFilter": {"emb_dim": (2, 4), "inner_layers": (10**6,), "fast": (9.0,), "target": (1.0,)},
    "HashConfig": {"sizes": ((1,), (10**6,)), "table_size": (10**9,), "functions": (10**6,)},
    "PolynomialHash": {"sizes": ((1,), (65,)), "table_size": (2**21 + 1,), "functions": (10**6,)},
    "ReleasedBLTConfig": {"vectors": (65,), "spare_reads": (1025,), "vocab_size": (10, 1025)},
    "EmbeddingConfig": {"vocab_size": (100,)},
    "PositionConfig": {"periods": ((-3,),)},
    "StackConfig": {
        "num_layers": (10**6,),
        "pattern": ("HX",),
        "dropout": (1.5, 1.0),
        "mixers": ({"Z": 3}, {5: HyenaConfig(dim=8)}),
        "activation": (("gelu", "silu"),),
    },
    "ByteClassifierConfig": {"num_classes": (1,), "squares": (3,), "columns": (64,), "vocab_size": (256,)},
    "ByteLMConfig": {"vocab_size": (256,)},
    "BLTConfig": {"look_back": (1,), "bridge_heads": (3,), "vocab_size": (10,)},
    "LevelConfig": {"slots_per_group": (1.0, 0.5), "min_slots": (3,), "max_slots": (1,)},
    "WordsConfig": {"longest": (10**9,), "gaps": (10**9,)},
    "LabelHeadConfig": {"outputs": (1,), "dropout": (1.0,)},
    "LabellerConfig": {"base": (None, 3)},
    "TaskHead": {"name": ("a/b", "log_variances")},
    "Fp8Config": {"history": (2000,), "margin": (9,)},
    "LossScaleConfig": {"first": (0.5, 2.0**25)},
    "TrainConfig": {
        "ema": (1.0,),
        "steps": (10**10,),
        "seed": (2**32,),
        "keep": (1,),
        "max_overflow": (1.5,),
        "profile_steps": ((4, 3), (-1, 3)),
    },
    "AdamWConfig": OPTIMIZER | {"b1": (2, 1.0), "b2": (2,)},
    "LionConfig": OPTIMIZER | {"b1": (1.0,), "b2": (2,)},
    "AdafactorConfig": OPTIMIZER | {"decay_rate": (1.5,), "least_factored": (1,)},
    "MuonConfig": OPTIMIZER | {"b1": (2,), "b2": (2,), "momentum": (1.0,)},
    "Classify": {"label_smoothing": (1.0,)},
    "Masked": {"rate": (1.0,), "hidden": (1.5,)},
    "Span": {"rate": (1.5,)},
    "MeshConfig": {"data": (-2,)},
    "Recipe": {
        "name": ("a/b",),
        "model": (None, 3, StackConfig),
        "entropy_model": (3,),
        "bytes_per_patch": (0.5,),
    },
    "MultiTask": {"causal": (False,)},
    "BenchmarkOptions": {"trials": (19,), "compare": (("none", "none"),)},
    "PlanConfig": {"fill": (1.1,)},
    "PolicyConfig": {"discount": (1.5,), "clip": (1.0, 0.3), "refresh": (8,)},
}

BAD = by_class(VALUES)
"""Of each class values of its fields, each of which is refused by itself."""
