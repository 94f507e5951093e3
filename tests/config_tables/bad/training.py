"""Values of one field that a config refuses: training, precision, meshes and commands."""

from typing import Any

from jaxblt.models import StackConfig
from jaxblt.training.objectives.objectives import NextByte
from tests.config_tables.bad.numbers import INF, NAN

OPTIMIZER: dict[str, tuple[Any, ...]] = {
    "per_rows": (0, -8, 2.5, "256"),
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
    "rates": ((("*/router/*", -0.1),), (("*", INF),), (("*",),), ("*", 2.0)),
}
"""Of all optimisers."""


TRAINING: dict[str, dict[str, tuple[Any, ...]]] = {
    "Fp8Config": {
        "scaling": ("block",),
        "history": (0, 1.5, 2000),
        "margin": (-1, 9, 0.5),
        "keep": ("head", (3,)),
    },
    "LossScaleConfig": {"first": (0.5, NAN, INF, "1", 2.0**25), "every": (0, 1.5)},
    "TrainConfig": {
        "sample_bytes": (-1, 2.5),
        "trackers": (("mlflow",), "jsonl"),
        "layer_norms": (1,),
        "ema": (0.0, 1.0, -0.1, NAN, "0.9"),
        "steps": (0, -5, 2.5, True, "10", NAN, 10**10),
        "accumulate": (0, 1.5),
        "seed": (-1, 0.5, 2**32),
        "dtype": ("float64", 16),
        "precision": ("fp4", 8),
        "fp8": ("delayed", None),
        "loss_scale": (2.0,),
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
    "AdamWConfig": OPTIMIZER | {"b1": (2, 1.0, -0.1, NAN), "b2": (2, NAN), "eps": (-1, 0.0, NAN)},
    "LionConfig": OPTIMIZER | {"b1": (1.0, -0.1), "b2": (2,)},
    "AdafactorConfig": OPTIMIZER | {"decay_rate": (0.0, 1.5), "least_factored": (1, 2.5)},
    "MuonConfig": OPTIMIZER | {"b1": (2,), "b2": (2,), "eps": (-1,), "momentum": (1.0, -0.1, NAN)},
    "Classify": {"label_smoothing": (-0.1, 1.0, NAN)},
    "Masked": {"rate": (0.0, 1.0, NAN), "hidden": (-0.1, 1.5), "swapped": (NAN,)},
    "Regress": {"center": (NAN, "0"), "scale": (0.0, -1, INF)},
    "Span": {"rate": (1.5,), "max_length": (0, 2.5)},
    "MeshConfig": {"data": (0, -2), "fsdp": (0, 1.5), "seq": (2.5, True), "tensor": ("2",)},
    "Schedule": {"stages": (0, 1.5), "micro_batches": (0, "4"), "kind": ("zb",)},
    "SequenceLayout": {"kind": ("spiral",)},
    "Recipe": {
        "name": ("", "a/b", 3),
        "model": (None, 3, StackConfig),
        "data": (None,),
        "objective": ("next",),
        "entropy_model": (3,),
        "bytes_per_patch": (0.5, NAN),
        "patcher": ("space",),
    },
    "TaskLoss": {"weight": (-1.0, NAN, INF), "objective": (None, NextByte())},
    "MultiTask": {"tasks": ((), 3), "weighting": ("learned",), "causal": (False,)},
    "BenchmarkOptions": {
        "trials": (19, 20.5),
        "compare": (("some",), ("none", "none")),
        "overwrite": (1,),
    },
    "PlanConfig": {
        "fill": (0.0, 1.1, NAN),
        "batch": (1,),
        "context": (0, -1),
        "memory_gb": (0.0, NAN),
        "longest": (1,),
        "gpu": ("",),
    },
    "OnlineConfig": {
        "rate": (0.0, NAN),
        **dict.fromkeys(("steps", "rows", "capacity"), (0, 2.5)),
        "replayed": (-1, 2.5),
        "ewc": (-0.1, NAN),
    },
    "PolicyConfig": {
        "method": ("a2c",),
        "discount": (-0.1, 1.5, NAN),
        "flip_price": (-0.1, NAN),
        "clip": (0.0, 1.0, NAN, 0.3),
        "refresh": (0, 2.5, 8),
    },
    "ReferenceConfig": {"run": ("",), "weight": (0.0, -1.0, NAN), "every": (0, 1.5)},
}
