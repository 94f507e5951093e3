"""Tiny models of transformers, on the CPU, with the PyTorch code that they fall back to.

Each is called as the documentation of models and caches says: `inputs_embeds`, a padding mask `attention_mask`, a
`DynamicCache` of the config, and `position_ids` as `generate` makes them; where a row says so, without them. Weights
are drawn larger than by a config's default, so that mixing is no small part of the outputs.
"""

import string

from jaxblt.testing.conformance import Subject

WITHOUT_POSITIONS = string.Template("""\
import torch, transformers
torch.manual_seed(0)
config = transformers.${name}Config(${options})
model = transformers.${name}Model(config).eval()
def call(x, documents=None, state=None):
    given = {} if documents is None else {"attention_mask": torch.tensor(documents)}
    found = model(inputs_embeds=torch.as_tensor(x), cache=state, use_cache=state is not None, **given)
    return found.last_hidden_state, state
start = lambda rows: ${start}
""")
"""The lines of a bridge to a model that counts positions itself, or has none."""

WITH_POSITIONS = string.Template("""\
import torch, transformers
torch.manual_seed(0)
config = transformers.${name}Config(${options})
model = transformers.${name}Model(config).eval()
def call(x, documents=None, state=None):
    (cache, seen), ones = state or (None, 0), np.ones(x.shape[:2], int)
    given = {} if documents is None else {"attention_mask": torch.tensor(documents)}
    given["position_ids"] = torch.tensor(seen + (ones if documents is None else documents).cumsum(-1) - 1).clamp(0)
    found = model(inputs_embeds=torch.as_tensor(x), cache=cache, use_cache=cache is not None, **given)
    return found.last_hidden_state, (cache, seen + x.shape[1])
start = lambda rows: (${start}, 0)
""")
"""The lines of a bridge that gives positions as `generate` does."""

PACKED = string.Template("""\
import torch, transformers
torch.manual_seed(0)
config = transformers.${name}Config(${options})
model = transformers.${name}Model(config).eval()
def call(x, documents=None):
    positions = [np.arange(n) for n in ([x.shape[1]] if documents is None else np.bincount(documents[0])[1:])]
    positions = torch.tensor(np.concatenate(positions))[None]
    return model(inputs_embeds=torch.as_tensor(x), position_ids=positions, use_cache=False).last_hidden_state, None
""")
"""The lines of a bridge to packed rows, whose positions restart as `DataCollatorWithFlattening` makes them."""

WIDTH = 16
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "initializer_range": 0.5,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16}

CACHED = frozenset(
    ["causal", "lengths", "batch", "padding", "left_padding", "state", "any_split", "gradients", "dtype"]
)
"""What documentation says of a causal model with a cache: padding on both sides, and prompts read in several calls."""


def _subject(
    name: str,
    title: str,
    *,
    lines: string.Template = WITH_POSITIONS,
    promises: frozenset[str] = CACHED,
    start: str = "transformers.DynamicCache(config=config)",
    called: str = "inputs_embeds, attention_mask, position_ids, cache",
    **sizes: object,
) -> Subject:
    options = ", ".join(f"{key}={value!r}" for key, value in (SIZES | sizes).items())
    return Subject(
        name=f"transformers: {title}",
        make=lines.substitute(name=name, options=options, start=start),
        width=WIDTH,
        promises=promises,
        lengths=(1, 2, 3, 5, 8, 17, 33, 70),
        peer="transformers",
        called=f"{name}Model(config)({called})",
    )


UNPOSITIONED = {"lines": WITHOUT_POSITIONS, "called": "inputs_embeds, attention_mask, cache"}
ALONE = {
    "lines": PACKED,
    "called": "inputs_embeds, position_ids",
    "promises": frozenset(["causal", "lengths", "documents", "gradients", "dtype"]),
}
DELTA = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 1}

BAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "attn_layer_indices": [1],
}
MINIMAX = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_local_experts": 2,
    "block_size": 16,
    "start": "transformers.models.minimax.modeling_minimax.MiniMaxCache()",
}

subjects = (
    _subject("Llama", "Llama", **HEADS),
    _subject("Llama", "Llama, packed rows", **ALONE, **HEADS),
    _subject(
        "Qwen3Next",
        "Qwen3-Next",
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        **HEADS,
        **DELTA,
        **EXPERTS,
    ),
    _subject(
        "Mamba2",
        "Mamba-2",
        state_size=8,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        chunk_size=16,
        **UNPOSITIONED,
    ),
    _subject("FalconMamba", "Falcon Mamba", state_size=8, time_step_rank=4, **UNPOSITIONED),
    _subject("Bamba", "Bamba", **BAMBA, **HEADS),
    _subject("Bamba", "Bamba, positions left out", **BAMBA, **HEADS, **UNPOSITIONED),
    _subject(
        "RecurrentGemma",
        "RecurrentGemma",
        lru_width=16,
        attention_window_size=8,
        block_types=["recurrent", "attention"],
        **HEADS,
    ),
    _subject("Lfm2", "LFM2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, **HEADS),
    _subject("MiniMax", "MiniMax", **MINIMAX, **HEADS, **EXPERTS),
    _subject("MiniMax", "MiniMax, positions left out", **MINIMAX, **HEADS, **EXPERTS, **UNPOSITIONED),
)
