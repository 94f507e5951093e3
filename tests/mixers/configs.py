"""The mixers under test, tiny; the first three are sharded over fewer devices too."""

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
    Mamba2Config,
    MixerConfig,
    ModalFilter,
    NTMConfig,
    SparseAttentionConfig,
    StateEngineConfig,
)
from pallas_kernels.attention.presets import local_global
from pallas_kernels.attention.rules import Global, Interval, RandomBlocks
from tests.mixers.guide import written
from tests.mixers.naive import NaiveConfig

MODAL = ModalFilter(modes=4, max_timescale=64.0)
IMPLICIT = ImplicitFilter(filter_len=600, width=8)
SHORT_IMPLICIT = ImplicitFilter(filter_len=20, width=8, shift=0.05, unit_energy=False, learned_features=True)
EXPLICIT = ExplicitFilter(taps=5)

GROUPED = {"num_heads": 2, "num_key_heads": 1, "head_dim": 8, "value_head_dim": 4, "chunk_size": 8}

FULL: dict[str, MixerConfig] = {
    "attention": AttentionConfig(dim=16, num_heads=4, num_kv_heads=2),
    "hyena_modal": HyenaConfig(dim=8, filter=MODAL),
    "recurrence": GatedRecurrenceConfig(dim=8),
}

REST: dict[str, MixerConfig] = {
    "attention_window": AttentionConfig(dim=16, num_heads=4, num_kv_heads=1, window=6),
    "attention_alone": AttentionConfig(dim=16, num_heads=2, position="none", packed=False),
    "attention_out_bias": AttentionConfig(dim=16, num_heads=2, rope_scale=4.0, out_bias=True),
    "attention_alibi": AttentionConfig(dim=16, num_heads=4, position="alibi", packed=False),
    "attention_rule": AttentionConfig(
        dim=16,
        num_heads=4,
        num_kv_heads=2,
        rule=Interval(5, 0) | Global(2, every=8) | RandomBlocks(1, block=4),
    ),
    "attention_both_rule": AttentionConfig(
        dim=16, num_heads=4, causal=False, rule=local_global(every=8, after=3)
    ),
    "sparse_attention": SparseAttentionConfig(
        dim=16, num_heads=4, num_kv_heads=2, head_dim=4, block=4, top_k=2, window=5, predictor=None
    ),
    "sparse_attention_learned": SparseAttentionConfig(
        dim=16, num_heads=4, num_kv_heads=2, head_dim=4, block=6, top_k=2, window=7, predictor=3
    ),
    "sparse_attention_both": SparseAttentionConfig(
        dim=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        block=8,
        top_k=2,
        window=9,
        causal=False,
        predictor=None,
    ),
    "attention_both": AttentionConfig(dim=16, num_heads=4, causal=False, packed=False),
    "attention_both_window": AttentionConfig(dim=16, num_heads=4, causal=False, window=4),
    "hyena_implicit": HyenaConfig(dim=8, order=3, filter=IMPLICIT),
    "hyena_modal_alone": HyenaConfig(dim=8, order=3, filter=MODAL, packed=False),
    "hyena_short_implicit": HyenaConfig(dim=8, filter=SHORT_IMPLICIT, short_taps=2, in_bias=True),
    "hyena_explicit": HyenaConfig(dim=8, filter=EXPLICIT, short_taps=4),
    "hyena_grouped": HyenaConfig(dim=8, filter=ExplicitFilter(taps=5, groups=2, skip=False), out_bias=True),
    "hyena_modal_both": HyenaConfig(dim=8, filter=MODAL, causal=False),
    "hyena_implicit_both": HyenaConfig(dim=8, filter=IMPLICIT, causal=False, packed=False),
    "hyena_explicit_both": HyenaConfig(dim=8, filter=EXPLICIT, causal=False),
    "minlstm": GatedRecurrenceConfig(dim=8, cell="minlstm"),
    "gru": GRUConfig(dim=8, num_heads=4),
    "lstm": LSTMConfig(dim=8, num_heads=4),
    "ntm": NTMConfig(dim=8, num_heads=4, slots=6, width=5),
    "gated_delta_net": GatedDeltaNetConfig(dim=8, **GROUPED),
    "delta_net_negative": GatedDeltaNetConfig(
        dim=8, num_heads=1, chunk_size=4, allow_negative_eigenvalues=True, gated=False
    ),
    "gated_linear_attention": GatedLinearAttentionConfig(dim=8, gate_rank=3, **GROUPED),
    "mamba2": Mamba2Config(dim=8, head_dim=8, state_dim=6, step_sizes=(0.1, 1.0), chunk_size=8),
    "dual_decay": DualDecayConfig(dim=8, num_heads=2, chunk_size=8),
    "state_engine": StateEngineConfig(
        dim=8, num_heads=2, head_dim=4, num_slots=6, top_k_states=2, chunk_size=4
    ),
    "state_engine_edges": StateEngineConfig(
        dim=8,
        num_heads=4,
        head_dim=3,
        num_slots=3,  # with more, gradients of routes drown in the noise of fp32 differences
        cell="gru",
        interval=5,
        state_attention=True,
        state_routes=True,
        chunk_size=4,
    ),
    "state_engine_counted": StateEngineConfig(
        dim=8, num_heads=2, levels=(8, 8), adaptive_count=True, chunk_size=8
    ),
    "hyena_modal_aligned": HyenaConfig(dim=4, filter=MODAL, segment_alignment=128),
    "hyena_explicit_aligned": HyenaConfig(dim=4, filter=EXPLICIT, segment_alignment=128),
}

ALL: dict[str, MixerConfig] = FULL | REST

NAIVE: dict[str, MixerConfig] = {
    "naive": NaiveConfig(),
    "naive_both": NaiveConfig(causal=False),
    "naive_steps": NaiveConfig(joins=False),
}
"""Mixers of the tests: every property holds of them by the driver."""

OF_DRIVER: dict[str, MixerConfig] = NAIVE | {"retention": written()["RetentionConfig"](dim=8)}
"""And the guide's."""

VARIANTS = (
    *("attention_window", "attention_alone", "attention_alibi", "attention_both_window"),
    *("attention_rule", "attention_both_rule", "sparse_attention_learned", "sparse_attention_both"),
    *(
        "attention_out_bias",
        "hyena_grouped",
        "hyena_modal_alone",
        "hyena_short_implicit",
        "hyena_implicit_both",
        "hyena_explicit_both",
    ),
    *("delta_net_negative", "state_engine_edges", "state_engine_counted"),
    *("hyena_modal_aligned", "hyena_explicit_aligned"),
)
"""Another option of a mixer that stands in the table besides, in the same direction."""
