"""Values of one field that a config refuses: models."""

from typing import Any

from jaxblt.mixers import HyenaConfig
from tests.config_tables.bad.numbers import NAN

MODELS: dict[str, dict[str, tuple[Any, ...]]] = {
    "HashConfig": {
        "sizes": ((), (1,), (3.5,), [3], (10**6,)),
        "table_size": (0, 2.5, 10**9),
        "functions": (0, 10**6),
    },
    "PolynomialHash": {
        "sizes": ((), (1,), (3.5,), [3], (65,)),
        "table_size": (0, 2.5, 2**21 + 1),
        "functions": (0, 10**6),
    },
    "ReleasedBLTConfig": {
        "vectors": (0, 65, 2.5),
        "spare_reads": (-1, 1025, 2.5),
        "reads_each_block": (1,),
        "vocab_size": (10, 1025),
        "encoder": (None,),
        "latent": (None,),
        "hash": (None, 3),
    },
    "EmbeddingConfig": {"dim": (0, 2.5), "vocab_size": (100,)},
    "PositionConfig": {"offset_periods": ((0,), (2.5,)), "periods": ((-3,), 8)},
    "StackConfig": {
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
        "norm_on_root": (1,),
        "layer_norm": (1,),
        "row_norm": (1,),
        "gated_mlp": (1,),
        "activation": ("relu", (), ("gelu", "silu"), ("gelu", "silu", "silu", "tanh")),
    },
    "ByteClassifierConfig": {
        "stack": (None, 3),
        "num_classes": (1, 2.5),
        "pooling": ("max",),
        "periods": ((0,), [32], (2.5,)),
        "vocab_size": (256,),
    },
    "ByteLMConfig": {
        "stack": (None, 3),
        "vocab_size": (256, 260.0),
        "tie_head": (1,),
        "head_bias": (1,),
        "reads_bos": (1,),
    },
    "CodedTurnsConfig": {
        "base": (None, 3),
        "turn": (0, 2.5),
        "code_dim": (0, 2.5),
        "codes": (0, 2.5),
    },
    "PositionLayerConfig": {"dim": (0, 2.5), "causal": (1,), "periods": ((), (0,), (2.5,), 3)},
    "BLTConfig": {
        "look_back": (1, 2.5),
        "bridge_heads": (0, 3, 2.5),
        "bridge_pattern": ("windows",),
        "bridge_chunk": (0, 2.5),
        "vocab_size": (10,),
        "encoder": (None,),
        "hash": (3,),
        "router": (3,),
        "level": (3,),
    },
    "LevelConfig": {
        "encoder": (None, 3),
        "decoder": (None, 3),
        "router": (None, 3),
        "slots_per_group": (1.0, 0.5, NAN),
        "min_slots": (0, 1.5, 3),
        "max_slots": (0, 1.5, 1),
    },
    "WordsConfig": {
        "letters": ("rna",),
        "longest": (0, 2.5, 10**9),
        "both_strands": (1,),
        "places": (-1, 2.5),
        "box": (-1, 2.5),
        "gaps": (-1, 2.5, 10**9),
    },
    "LabelHeadConfig": {
        "target": ("text",),
        "outputs": (0, 1, 2.5),
        "pool": ("median",),
        "dropout": (1.0, -0.1, NAN),
    },
    "LabellerConfig": {"base": (None, 3), "head": (None, "mean"), "strands": ("two",)},
    "TaskHead": {"name": ("", "a/b", "log_variances"), "head": (None, "mean")},
    "TaskHeadsConfig": {"tasks": ((), ("t",)), "balance": ("uncertainty",)},
}
