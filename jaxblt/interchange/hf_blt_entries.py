"""Tensors of a `BltForCausalLM` as parameters of jaxblt, and back.

Weights W [out, in] of a linear layer become kernels [in, out]. Rotary positions there turn neighbouring channels
(2i, 2i + 1); here they turn (i, i + K/2). So the channels of queries and keys change places, which no product of the
two sees. Queries and keys between bytes and patches have no positions, and stay as they are.
"""

from typing import Any

import numpy as np

from jaxblt.interchange.entry import Entry, inside, same, turned
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.released_blt import ReleasedBLTConfig

PATCHER = "model.patcher."
"""How names of the entropy model begin."""


def model_entries(config: ReleasedBLTConfig) -> dict[str, Entry]:
    """Return every tensor of a model's checkpoint by its name there, without its entropy model."""
    encoder, latent, decoder = config.encoder, config.latent, config.decoder
    width, ids = config.vectors * encoder.dim, config.vocab_size
    rows = config.hash.num_tables * config.hash.table_size
    up = {"patch_embedding_projection.weight": turned((width, encoder.dim), "project.kernel")}
    for i in range(config.spare_reads + 1):
        up |= inside(f"cross_attn_layers.{i}.", _read(encoder), f"read_{i}.")
    down = {
        "patch_embedding_projection.weight": turned((width, latent.dim), "spread.kernel"),
        "norm.weight": same((decoder.dim,), "head.norm.scale"),
    }
    each = config.decoder_parts[0].num_layers
    for i in range(decoder.num_layers):
        part, place = divmod(i, each)
        down |= inside(f"layers.{i}.", _block(decoder), f"decoder_{part}.period_{place}.block_0.")
    for i in range(len(config.decoder_parts)):
        down |= inside(f"cross_attn_layers.{i}.", _read(decoder), f"read_{i}.read.")
    found = {
        "model.local_encoder.embed_tokens.weight": same((ids, encoder.dim), "embedding.bytes"),
        "model.encoder_hash_tok_embedding.weight": same((rows, encoder.dim), "embedding.hash_ngrams"),
        "lm_head.weight": turned((ids, decoder.dim), "head.logits.kernel"),
    }
    if width != latent.dim:
        name = "model.global_transformer.token_embedding_projection.weight"
        found[name] = turned((latent.dim, width), "widen.kernel")
    found |= inside("model.local_encoder.", up, "up.") | inside("model.local_decoder.", down, "")
    found |= inside("model.local_encoder.", _blocks(encoder), "encoder.")
    return found | inside("model.global_transformer.", _blocks(latent), "latent.")


def patcher_entries(config: ByteLMConfig) -> dict[str, Entry]:
    """Return every tensor of the entropy model by its name in the whole model's checkpoint."""
    stack, ids = config.stack, config.vocab_size
    found = {
        "embed_tokens.weight": same((ids, stack.dim), "embedding.bytes"),
        "norm.weight": same((stack.dim,), "head.norm.scale"),
        "lm_head.weight": turned((ids, stack.dim), "head.logits.kernel"),
    }
    return inside(PATCHER, found, "") | inside(PATCHER, _blocks(stack), "stack.")


def _blocks(stack: StackConfig) -> dict[str, Entry]:
    """Return the blocks of an unrolled stack."""
    found = {}
    for i in range(stack.num_layers):
        found |= inside(f"layers.{i}.", _block(stack), f"period_{i}.block_0.")
    return found


def _block(stack: StackConfig) -> dict[str, Entry]:
    """Return norms, attention and MLP of a block."""
    dim, hidden = stack.dim, stack.hidden
    attention = _attention(stack, turns=True)
    return inside("self_attn.", attention, "mixer.") | {
        "input_layernorm.weight": same((dim,), "mixer_norm.scale"),
        "post_attention_layernorm.weight": same((dim,), "mlp_norm.scale"),
        "mlp.gate_proj.weight": turned((hidden, dim), "mlp.gate.kernel"),
        "mlp.up_proj.weight": turned((hidden, dim), "mlp.up.kernel"),
        "mlp.down_proj.weight": turned((dim, hidden), "mlp.down.kernel"),
    }


def _read(stack: StackConfig) -> dict[str, Entry]:
    """Return an attention between bytes and patches."""
    return _attention(stack, turns=False) | {
        "q_norm.weight": same((stack.dim,), "query_norm.scale"),
        "k_norm.weight": same((stack.dim,), "key_norm.scale"),
    }


def _attention(stack: StackConfig, *, turns: bool) -> dict[str, Entry]:
    """Return projections of the heads of a stack; `turns` says that queries and keys have rotary positions."""
    mixer: Any = stack.mixer(stack.pattern[0])
    dim, width, heads, groups = stack.dim, mixer.width, mixer.num_heads, mixer.groups

    def out(x: np.ndarray) -> tuple[Any, ...]:
        return (x.transpose(1, 0).reshape(heads, width, dim),)

    return {
        "q_proj.weight": _heads(dim, heads, width, "q.kernel", turns=turns),
        "k_proj.weight": _heads(dim, groups, width, "k.kernel", turns=turns),
        "v_proj.weight": _heads(dim, groups, width, "v.kernel", turns=False),
        "o_proj.weight": Entry(
            (dim, heads * width),
            ("out.kernel",),
            out,
            lambda x: x.reshape(heads * width, dim).transpose(1, 0),
        ),
    }


def _heads(dim: int, count: int, width: int, name: str, *, turns: bool) -> Entry:
    """Return a projection to heads, [count * width, dim] there and [dim, count, width] here."""

    def ours(x: np.ndarray) -> tuple[Any, ...]:
        split = x.reshape(count, width, dim).transpose(2, 0, 1)
        return (np.concatenate([split[..., ::2], split[..., 1::2]], -1) if turns else split,)

    def theirs(x: np.ndarray) -> np.ndarray:
        if turns:
            x = np.stack(np.split(x, 2, -1), -1).reshape(x.shape)
        return x.transpose(1, 2, 0).reshape(count * width, dim)

    return Entry((count * width, dim), (name,), ours, theirs)
