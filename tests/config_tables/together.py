"""Fields that a config refuses together, and edges of ranges that mean something."""

from typing import Any

import numpy as np

from jaxblt.adapters import (
    AdapterLosses,
    ChunkMean,
    Draw,
    Neighbours,
    Prefix,
    RouterConfig,
    Side,
    Sticky,
    Traces,
)
from jaxblt.adapters.experimental.capacity import Capacity
from jaxblt.mixers import ExplicitFilter, ModalFilter
from jaxblt.models import ByteLMConfig, LabelHeadConfig, LevelConfig, StackConfig
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.precision import Fp8Config, LossScaleConfig
from jaxblt.training.experimental.hybrid import HybridNextByte
from jaxblt.training.experimental.policy import PolicyConfig
from pallas_kernels.attention import Chosen
from pallas_kernels.attention.rules import PrefixLM, Strided

BOTH_WAYS = {
    name: StackConfig(dim=dim, num_layers=1, pattern="A", causal=False)
    for name, dim in (("encoder", 64), ("latent", 96), ("decoder", 64))
}
"""Stacks of a model that sees the future."""

BAD_TOGETHER: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "EngineConfig": (
        ({"beams": 9}, "EngineConfig.beams=9 rows of 8192 bytes or more exceed the largest lane"),
    ),
    "SlotMemoryConfig": (
        ({"slots": 4, "top_k": 9}, "SlotMemoryConfig.top_k must lie in 1..slots = 4, got 9"),
        ({"ratio": 0.0}, "got 0.0: it is the share of an interval's tokens"),
        ({"prune_below": 0.1, "prune_after": 0}, "SlotMemoryConfig.prune_after must be at least 1"),
    ),
    "Sampling": (
        ({"presence_penalty": 101.0}, "Sampling.presence_penalty must lie in -100.0..100.0, got 101.0"),
    ),
    "Request": (({"prompt": "text"}, "Request.prompt must be bytes, got 'text': call its encode()"),),
    "ModalFilter": (({"min_timescale": 5.0, "max_timescale": 2.0}, "got 5.0 and 2.0"),),
    "ImplicitFilter": (({"fast": 2.0}, "expected fast <= slow, got 2.0 and 1.5"),),
    "ListOps": (
        ({"max_depth": 2, "max_args": 2, "min_symbols": 501}, "min_symbols must be at most 4, the longest"),
        (
            {"max_depth": 3, "max_args": 3, "min_symbols": 30, "max_symbols": 40},
            "min_symbols must be at most 17, the longest expression",
        ),
    ),
    "StateEngineConfig": (
        ({"levels": (4, 2), "num_slots": 5}, "hold 6 slots, got num_slots = 5"),
        ({"num_slots": 4, "top_k_states": 5}, "at most slots = 4, got 5"),
        ({"num_slots": 4, "adaptive_count": True}, "got 4: raise num_slots"),
        ({"adaptive_count": True, "top_k_states": 5}, "top_k_states must be at most 4"),
    ),
    "HyenaConfig": (
        (
            {"filter": ExplicitFilter(512), "implementation": "monarch"},
            "or None with ExplicitFilter, which blocked_conv runs",
        ),
        (
            {"filter": ModalFilter(), "implementation": "monarch"},
            "with ModalFilter, which modal_conv runs, got 'monarch'",
        ),
    ),
    "AttentionConfig": (
        ({"num_heads": 8, "num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        ({"position": "alibi", "causal": False}, "use position='rope' when causal=False"),
        ({"rule": PrefixLM(4)}, "shows later keys and causal=True hides them: set causal=False"),
        ({"rule": Strided(2) | PrefixLM(4)}, "shows later keys"),
        (
            {"rule": Chosen(np.zeros((1, 1, 4, 1), np.int32))},
            "AttentionConfig.rule holds arrays, got a Chosen: ",
        ),
        ({"rule": Strided(2), "context_parallel": "ring"}, "a rule goes round a ring by times"),
        ({"rule": Strided(2), "layout": "zigzag"}, "a rule goes round a ring by times"),
        (
            {"position": "none", "rope_theta": 500.0},
            "AttentionConfig.rope_theta = 500.0 is read with position='rope' only",
        ),
        (
            {"position": "alibi", "rope_scale": 4.0},
            "AttentionConfig.rope_scale = 4.0 is read with position='rope' only",
        ),
    ),
    "CodedTurnsConfig": (
        ({"base": ByteLMConfig()}, "CodedTurnsConfig.base has state engines without edges of widths []"),
    ),
    "ByteLMConfig": (
        ({"head_bias": True}, "ByteLMConfig.head_bias = True is read with tie_head=False only"),
    ),
    "StackConfig": (
        ({"norm_on_root": True, "layer_norm": True}, "StackConfig.norm_on_root = True is of RMS norms"),
        ({"pattern": "SASD", "num_layers": 2}, "'SASD' names 4 layers, and num_layers is 2: "),
        ({"pattern": ()}, "pattern is empty (()): name a mixer for each layer"),
        ({"pattern": "R"}, "write 'recurrence', or add a config"),
        ({"pattern": ("attenton",)}, "write 'attention', or add a config"),
        ({"pattern": "HN"}, "experimental mixer is named by its config, such as mixers={'N': NTMConfig"),
        ({"row_norm": True}, "StackConfig.row_norm = True reads whole documents in one way, and causal=True"),
    ),
    "AdamWConfig": (
        (
            {"schedule": "constant", "floor": 0.0},
            "optimizer.floor = 0.0 is read with schedule='cosine', 'linear' or",
        ),
        ({"schedule": "constant", "decay_steps": 9}, "optimizer.decay_steps = 9 is read with schedule="),
        (
            {"weight_decay": 0.0, "decay_embeddings": True},
            "decay_embeddings = True is read with weight_decay above 0",
        ),
    ),
    "Fp8Config": (({"history": 3}, "Fp8Config.history = 3 is read with scaling='delayed' only"),),
    "TrainConfig": (
        (
            {"precision": "fp8", "dtype": "float32"},
            "TrainConfig.precision='fp8' rounds products that are else in",
        ),
        ({"keep": 1}, "TrainConfig.keep must be at least 2, got 1, so that there is one to fall back to"),
        ({"eval_every": -1}, "eval_every must be at least 0, got -1: 0 evaluates never"),
        ({"eval_batches": 0}, "eval_batches must be at least 1, got 0: None takes the whole split"),
        ({"max_overflow": 1.5}, "max_overflow must lie in 0..1, got 1.5: it is a share"),
        ({"ema": 1.0}, "1.0: it is a decay"),
        ({"fp8": Fp8Config(margin=1)}, "is read with precision='fp8' only"),
        ({"loss_scale": LossScaleConfig(every=9)}, "is read with dtype='float16' only"),
        (
            {"eval_every": 0, "sample_bytes": 9},
            "TrainConfig.sample_bytes = 9 is read with eval_every above 0 only",
        ),
        ({"eval_every": 0, "keep_best": 1}, "TrainConfig.keep_best = 1 is read with eval_every above 0 only"),
        ({"eval_every": 0, "patience": 2}, "TrainConfig.patience = 2 is read with eval_every above 0 only"),
        (
            {"eval_every": 0, "best_by": "f1"},
            "TrainConfig.best_by = 'f1' is read with eval_every above 0 only",
        ),
    ),
    "DataConfig": (
        ({"paths": "a.txt"}, "paths must be a tuple of paths, got 'a.txt': write ('a.txt',)"),
        ({"buckets": (8,)}, "buckets (8,) need packing='buckets', got packing='windows'"),
        ({"stride": 3, "packing": "first_fit"}, "stride and context are of packing='windows', got 3 and 0"),
        ({"test_names": ("x",)}, "need split='names', got split='position'"),
        ({"max_tokens": 10**6}, "max_tokens 1000000 needs packing='buckets', got packing='windows'"),
        ({"bed": "x.bed"}, "bed='x.bed' needs kind='fasta', got 'text'"),
        ({"reverse_complement": True}, "reverse_complement needs eos=False"),
        (
            {"reverse_complement": True, "kind": "fasta", "entropies": "e.npy"},
            "entropies='e.npy' are of one strand",
        ),
        ({"length_schedule": ((2, 8),), "packing": "first_fit"}, "needs packing='windows' without stride"),
        ({"length_schedule": ((2, 8),), "stride": 16}, "needs packing='windows' without stride"),
    ),
    "PatcherConfig": (
        ({"min_length": 9, "max_length": 8}, "min_length 9 exceeds max_length 8"),
        ({"mode": "static", "patch_size": 0}, "patch_size"),
        ({"mode": "space", "monotonic": True}, "belong to mode='entropy'"),
        ({"mode": "greedy", "threshold_add": 0.1}, "belong to mode='entropy'"),
        ({"monotonic": True, "threshold_add": 0.1}, "not both"),
        ({"mode": "greedy", "threshold": -1.0}, "at least 0, got -1.0: nats, in mode='greedy'"),
        ({"mode": "optimal", "patch_cost": -1.0}, "patch_cost"),
        ({"num_patches": 4}, "length_constrained"),
        ({"mode": "length_constrained"}, "length_constrained"),
        (
            {"mode": "length_constrained", "num_patches": 3, "block_size": 64, "max_length": 16},
            "choose num_patches in 4..64",
        ),
        (
            {"mode": "length_constrained", "num_patches": 20, "block_size": 64, "min_length": 4},
            "choose num_patches in 1..16",
        ),
        (
            {"mode": "length_constrained", "num_patches": 8, "capacity": 7, "block_size": 64},
            "exceeds capacity",
        ),
        (
            {"mode": "space", "threshold": 0.5},
            "PatcherConfig.threshold = 0.5 is read with a mode that needs entropies",
        ),
        (
            {"mode": "byte", "margin": 0.1},
            "PatcherConfig.margin = 0.1 is read with a mode that needs entropies",
        ),
        (
            {"mode": "static", "entropy_context": 64},
            "PatcherConfig.entropy_context = 64 is read with a mode that",
        ),
        (
            {"mode": "static", "patch_cost": 2.0},
            "PatcherConfig.patch_cost = 2.0 is read with mode='optimal' or",
        ),
        (
            {"mode": "learned", "threshold": 0.5},
            "PatcherConfig.threshold = 0.5 is read with a mode that needs entropies",
        ),
        ({"mode": "learned", "target": 1.0}, "PatcherConfig.target must be > 1, got 1.0"),
        ({"mode": "learned", "target": 9.0, "max_length": 8}, "lengths that patches may have, 1..8"),
    ),
    "BoundaryConfig": (
        ({"strategy": "pattern_aware"}, "pattern_aware has no motifs: set motifs to IUPAC strings"),
        ({"strategy": "adaptive_hybrid"}, "pattern_aware has no motifs: set motifs to IUPAC strings"),
        (
            {"strategy": "pattern_aware", "motifs": ("TAXE",)},
            "motif 'TAXE' has E, X, which are no IUPAC codes",
        ),
        ({"strategy": "pattern_aware", "motifs": ("A" * 65,)}, "a motif has 65 places, and 1..64 are read"),
        ({"strategy": "pattern_aware", "motifs": ("NN",)}, "weighs all bases alike at every place"),
        ({"strategy": "entropy_based", "plain": True}, "BoundaryConfig.plain = True is read with content_"),
        (
            {"strategy": "adaptive_hybrid", "parts": ()},
            "parts must be different scores, at least one, got ()",
        ),
    ),
    "LevelConfig": (
        ({"encoder": StackConfig(dim=64, pattern="W")}, "share the slots' width, got 64 and 384"),
        (
            {"decoder": StackConfig(dim=384, pattern="W", causal=False)},
            "a level cuts by slots up to its own, in order: use causal stacks",
        ),
        (
            {"router": BoundaryConfig(unmerge="attention")},
            "a level's router takes strategy='content_similarity' and unmerge='gather'",
        ),
        (
            {"slots_per_group": 4.0, "max_slots": 3},
            "slots_per_group = 4.0 lies outside the lengths that groups may have, 1..3",
        ),
    ),
    "BLTConfig": (
        (
            {"level": LevelConfig(), **BOTH_WAYS},
            "a level cuts by slots up to its own, and the stacks see the future",
        ),
        ({"router": BoundaryConfig()}, "set features_enter='output', got 'input'"),
        (
            {"router": BoundaryConfig(), "features_enter": "output", **BOTH_WAYS},
            "a router cuts by bytes up to its own, and the stacks see the future",
        ),
        (
            {"router": BoundaryConfig(), "features_enter": "output", "bridge_pattern": "dilated"},
            "bridge_pattern",
        ),
    ),
    "ReleasedBLTConfig": (
        (
            {"encoder": StackConfig(dim=256, num_layers=1, pattern="W")},
            "expected one attention and scan=False",
        ),
        (
            {"decoder": StackConfig(dim=256, num_layers=2, pattern="WA", scan=False)},
            "bytes read patches between",
        ),
        ({"encoder": StackConfig(dim=64, num_layers=1, pattern="W", scan=False)}, "share the bytes' width"),
        ({"latent": StackConfig(pattern="A", causal=False)}, "ReleasedBLTConfig.latent has causal=False"),
        ({"latent": StackConfig(pattern="AH")}, "ReleasedBLTConfig.latent has HyenaConfig"),
        ({"latent": StackConfig(pattern="W")}, "ReleasedBLTConfig.latent has AttentionConfig"),
    ),
    "WordsConfig": (
        (
            {"letters": "protein", "both_strands": True},
            "WordsConfig.both_strands is of DNA, and letters = 'protein'",
        ),
        ({"letters": "phrases", "places": 9}, "WordsConfig.places = 9 are of aligned DNA or proteins"),
        ({"letters": "phrases", "gaps": 2}, "WordsConfig.gaps = 2 are of DNA or proteins"),
        ({"box": 6}, "WordsConfig.box = 6 parts places, and places = 0"),
        ({"places": 9, "both_strands": True}, "places = 9 are of one strand, and both_strands is True"),
        (
            {"longest": 11},
            "longest = 11, places = 0, box = 0 and gaps = 0 make 5,592,404 features of dna, and 1,048,576 are",
        ),
        ({"letters": "protein", "longest": 3, "gaps": 4000}, "gaps = 4000 make"),
    ),
    "LabelHeadConfig": (
        ({"target": "positions", "pool": "max"}, "LabelHeadConfig.pool = 'max' is read with target="),
    ),
    "LabellerConfig": (
        (
            {"head": LabelHeadConfig(target="positions", crf=True), "strands": "both"},
            "takes the mean of both strands, and the potentials of a CRF are of one direction",
        ),
    ),
    "Masked": (
        ({"hidden": 0.0, "swapped": 0.0}, "hidden + swapped must be above 0 and at most 1, got 0.0 + 0.0"),
        ({"hidden": 0.9, "swapped": 0.2}, "hidden + swapped must be above 0 and at most 1, got 0.9 + 0.2"),
    ),
    "HybridNextByte": (
        ({"margin": 2.0}, "HybridNextByte.margin = 2.0 is read with weights of negatives above 0 only"),
        (
            {"policy": PolicyConfig(discount=0.1)},
            "HybridNextByte.policy = PolicyConfig(method='reinforce', discount=0.1",
        ),
    ),
    "Governor": (
        ({"least": 2.0}, "Governor.start must lie in 2.0..most = 5.0, got 1.0"),
        ({"low": 0.2}, "Governor.low must be at least 0 and < high = 0.1, got 0.2"),
    ),
    "Neighbours": (({"capacity": 8, "count": 9}, "count = 9 is more than capacity = 8"),),
    "RouterConfig": (
        ({"reads": (Prefix,)}, "must hold reads such as Prefix(16), got"),
        ({"reads": (ChunkMean(), Side(2), Side(3))}, "Side(features=3), whose states"),
        ({"level": "prefix", "reads": (Prefix(), Neighbours())}, "nothing for level prefix: leave it out"),
        ({"lag": 2, "reads": (ChunkMean(), Traces())}, "RouterConfig.lag = 2 asks for a code that is known"),
        ({"reads": ()}, "holds nothing that level 'chunk' reads: add ChunkMean()"),
    ),
    "AdapterConfig": (
        (
            {"router": RouterConfig(), "code": (Draw(),)},
            "Draw chooses an expert of a bank, and blocks is None",
        ),
        ({"router": RouterConfig(), "code": (Sticky(),)}, "blocks is None: set the number of experts"),
        ({"router": RouterConfig(), "code": (Capacity(),)}, "blocks is None: set the number of experts"),
        (
            {"router": RouterConfig("prefix"), "blocks": 2, "code": (Capacity(),)},
            "level 'prefix' gives it one: leave it out",
        ),
        ({"sites": ()}, "AdapterConfig.sites must hold a pattern, such as 'mixer/*', got ()"),
        (
            {"losses": AdapterLosses(flip=0.1)},
            "AdapterConfig.losses weighs ['flip'] of a router's code, and router is",
        ),
        (
            {"sites": (), "gates": ("mixer/q",), "alpha": 3.0},
            "AdapterConfig.alpha = 3.0 is read with sites only",
        ),
        (
            {"sites": (), "gates": ("mixer/q",), "losses": AdapterLosses(orthogonality=0.5)},
            "weighs orthogonality = 0.5 of sites, and sites is ()",
        ),
        ({"key_bias": True}, "AdapterConfig.key_bias = True needs a router"),
    ),
    "Recipe": (
        (
            {"objective": HybridNextByte(reference=((0, 2.0),))},
            "HybridNextByte.reference = ((0, 2.0),) is read with Recipe.ref",
        ),
    ),
}
"""Of each class fields that are refused together, and what is said of them."""

NEVER = {"warmup_steps": (0,), "floor": (0.0,), "weight_decay": (0.0,)}
"""Of all optimisers."""

MEANT: dict[str, dict[str, tuple[Any, ...]]] = {
    "TrainConfig": {"trackers": ((),), "eval_every": (0,), "max_overflow": (0.0,)},
    "AdamWConfig": NEVER | {"b1": (0.0,), "b2": (0.0,)},
    "LionConfig": NEVER | {"b1": (0.0,), "b2": (0.0,)},
    "AdafactorConfig": NEVER,
    "MuonConfig": NEVER | {"b1": (0.0,), "b2": (0.0,), "momentum": (0.0,)},
    "ScheduleConfig": {"warmup_steps": (0,), "floor": (0.0,)},
    "Masked": {"hidden": (0.0,), "swapped": (0.0,)},
    "Regress": {"center": (-1.0,)},
    "TaskLoss": {"weight": (0.0,)},
    "PatcherConfig": {"threshold": (0.0, -1.0), "threshold_add": (0.0, -1.0), "margin": (0.0,)},
    "Pathfinder": {"short_contours": (0,)},
    "Drafts": {"count": (0,)},
    "SamplingConfig": {"temperature": (0.0,)},
    "Request": {"adapter": (0,)},
    "Sampling": {"temperature": (0.0,), "frequency_penalty": (-1.0,), "presence_penalty": (-1.0,)},
    "BoundaryConfig": {"ratio_weight": (0.0,)},
    "PositionConfig": {"offset_periods": ((),), "periods": ((),)},
    "StackConfig": {"mlp_dim": (0,)},
    "StateEngineConfig": {"balance_weight": (0.0,)},
    "SlotMemoryConfig": {"rate": (0.0,), "novelty": (0.0, -1.0), "balance": (0.0,), "usage_decay": (0.0,)},
    "StateManager": {"decay": (0.0,), "threshold": (0.0,)},
    "ImplicitFilter": {"inner_layers": (0,)},
    "PolicyConfig": {"discount": (0.0,)},
    "AdapterLosses": {"entropy": (-1.0,)},
    "RouterConfig": {"fallback": (0.0,)},
    "Governor": {"low": (0.0,)},
    "Ema": {"decay": (0.0,)},
    "Sticky": {"tau": (0.0,)},
    "Guess": {"tau": (0.0, -1.0)},
    "Codebook": {"commitment": (0.0,)},
    "OnlineConfig": {"replayed": (0,)},
    "Film": {"shift": (0.0,)},
    "Limits": {"most_flips": (0.0,), "most_violations": (0.0,)},
}
"""Of each class zeros, negative numbers, and empty texts and tuples that mean something and are no defaults."""
