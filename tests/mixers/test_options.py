"""An option of a mixer changes its program, or is refused where nothing reads it."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxblt.mixers import (
    AttentionConfig,
    ExplicitFilter,
    MACConfig,
    MAGConfig,
    MixerConfig,
    NeuralMemoryConfig,
    SlotMemoryConfig,
)
from jaxblt.mixers.slots.experimental.state_manager import StateManager
from jaxblt.side_outputs import SIDE_OUTPUTS
from pallas_kernels.attention.rules import Strided
from tests.mixers.configs import ALL

MEMORY = {"dim": 8, "num_heads": 2, "chunk_size": 4}
CONFIGS: dict[str, MixerConfig] = {
    **{
        name: ALL[name]
        for name in (
            *(
                "attention",
                "attention_alibi",
                "sparse_attention",
                "hyena_modal",
                "hyena_implicit",
                "recurrence",
            ),
            *("gru", "lstm", "ntm", "gated_delta_net", "gated_linear_attention", "mamba2"),
            *("dual_decay", "state_engine", "state_engine_edges", "state_engine_counted"),
        )
    },
    "attention_none": AttentionConfig(dim=16, num_heads=4, position="none"),
    "neural_memory": NeuralMemoryConfig(**MEMORY),
    "mac": MACConfig(**MEMORY, packed=False),
    "mag": MAGConfig(**MEMORY, window=8),
    "slots": SlotMemoryConfig(dim=8, num_heads=2, slots=8, interval=4),
    "slots_pruned": SlotMemoryConfig(dim=8, num_heads=2, slots=8, interval=4, prune_below=0.2),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "num_heads": (1, 2),
    "num_key_heads": (2,),
    "num_kv_heads": (1, 4),
    "head_dim": (2, 6),
    "value_head_dim": (6,),
    "window": (5, 12),
    "causal": (False,),
    "position": ("alibi", "none"),
    "rope_theta": (500.0,),
    "rope_scale": (3.0,),
    "rule": (Strided(4),),
    "block": (2, 8),
    "in_bias": (True, False),
    "out_bias": (True,),
    "fp8_in": (True,),
    "implementation": ("reference",),
    "order": (3, 2),
    "short_taps": (2,),
    "filter": (ExplicitFilter(taps=3),),
    "cell": ("mingru", "minlstm", "gru", "lstm"),
    "chunk_size": (16,),
    "gated": (False,),
    "allow_negative_eigenvalues": (True,),
    "gate_rank": (2,),
    "expand": (3,),
    "state_dim": (4,),
    "num_groups": (2,),
    "step_sizes": ((0.2, 0.3),),
    "slots": (5,),
    "width": (4,),
    "num_slots": (7,),
    "levels": ((9, 5),),
    "top_k_states": (1,),
    "gathered": (True, False),
    "interval": (3,),
    "full": (False,),
    "state_attention": (True, False),
    "state_routes": (True, False),
    "adaptive_count": (True, False),
    "manager": (StateManager(threshold=0.3),),
    "balance_weight": (0.5,),
    "count_weight": (0.5,),
    "depth": (1,),
    "persistent": (2,),
    "ratio": (0.25,),
    "adaptive_error": (0.5,),
    "rate": (0.5,),
    "novelty": (0.1,),
    "balance": (0.3,),
    "usage_decay": (0.3,),
    "top_k": (2, 1),
    "predictor": (3,),
    "prune_below": (0.3,),
    "prune_after": (3,),
}
"""Other values of options, of which a config takes one at least, or refuses all."""
NEED_MORE = ("dim", "packed", "segment_alignment", "context_parallel", "layout")
"""The first comes with the input, the next two are promises of the data, and the last two are of meshes."""


def program(config: Any) -> str:
    """What a training call traces to, constants included."""
    mixer, x, ids = config.build(), jnp.zeros((1, 16, config.dim)), jnp.ones((1, 16), jnp.int32)

    def run(x: Any, ids: Any) -> Any:
        return mixer.apply(mixer.init(jax.random.key(0), x), x, segment_ids=ids, mutable=SIDE_OUTPUTS)

    traced = jax.make_jaxpr(run)(x, ids)
    return re.sub("0x[0-9a-f]+", "", f"{traced} {[x.tolist() for x in traced.consts]}")


@pytest.mark.slow(days=28, group="options")
@pytest.mark.parametrize("name", CONFIGS)
def test_an_option_changes_the_program_or_is_refused(name: str) -> None:
    """Annotations are off here, as wherever `pytest.raises` stands: options of all mixers are tried on each."""
    config = CONFIGS[name]
    before, unread = program(config), []
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        given = () if field.name in NEED_MORE else OTHERS[field.name]
        tried = (value for value in given if value != getattr(config, field.name))
        if given and not any(is_heard(config, field.name, value, before) for value in tried):
            unread.append(field.name)
    assert not unread, f"{type(config).__name__}: nothing reads {unread} here: refuse them by check_read"


def is_heard(config: Any, name: str, value: Any, before: str) -> bool:
    """Whether a config refuses another value of an option, or makes another program of it than `before`."""
    try:
        return program(dataclasses.replace(config, **{name: value})) != before
    except ValueError:
        return True
