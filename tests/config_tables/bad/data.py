"""Values of one field that a config refuses: sources, tasks and patchers."""

from typing import Any

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
    PatternMatching,
    RepeatCopy,
    TextLabels,
    TextPairs,
)
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from tests.config_tables.bad.numbers import INF, NAN

SETS = {"train_size": (0, 2.5), "eval_size": (0, 2.5), "sets_seed": (-1, 0.5, 2**32)}
"Bad sizes and seeds of every task whose examples are drawn."


DATA: dict[type, dict[str, tuple[Any, ...]]] = {
    SourceConfig: {
        "name": ("", "a/b", 3),
        "weight": (0.0, -1.0, NAN, INF, "1"),
        "kind": ("fastq",),
        "soft_mask": ("drop",),
    },
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
        "patch_size": (0, 4.5, 8),
        "patch_cost": (-1.0, NAN, 2.0),
        "min_length": (0, 5000),
        "max_length": (0, 5000, 8.5),
        "block_size": (0, 4096.0),
        "capacity": (0, 5000, 2.5),
        "margin": (-1e-6, NAN),
        "entropy_context": (0, 17, 2.5),
        "target": (4.5, NAN),
        "reads_entropies": (True, 1),
    },
    BoundaryConfig: {
        "strategy": ("byte_pair",),
        "plain": (1,),
        "motifs": (("TATAAT",), ("",)),
        "matrices": (((1.0, 0.0, 0.0),),),
        "learned_motifs": (-1, 2.5, 8),
        "motif_length": (0, 65, 2.5, 6),
        "codon_phase": (True,),
        "parts": (("entropy_based",), ("byte_pair",)),
        "unmerge": ("pool",),
        "ratio_weight": (-0.1, NAN),
    },
    LabelTask: {"column": ("", "a/b", 3), "target": ("positions",), "classes": (("a", "a"), ("",))},
}
