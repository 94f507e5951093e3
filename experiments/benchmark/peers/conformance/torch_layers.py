"""Layers of smaller PyTorch projects, and of PyTorch itself, on the CPU."""

import string
from typing import Any

import numpy as np

from experiments.benchmark.peers.conformance.common import STREAMED
from jaxblt.testing.conformance import Layer, Subject

MERGED = string.Template("""\
import peft, torch
torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(16, 16))
tuned = peft.get_peft_model(base, peft.${config}Config(target_modules=["0"], ${options}))
for name, parameter in tuned.named_parameters():
    if parameter.requires_grad:
        torch.nn.init.normal_(parameter, std=0.3)
x = np.random.default_rng(1).standard_normal((1, 4, 16)).astype("float32")
apart = __import__("copy").deepcopy(tuned).eval()
merged = tuned.merge_and_unload()
def call(x, documents=None, state=None):
    return merged(torch.as_tensor(x)), None
def reference(x):
    return apart(torch.as_tensor(x).float())
""")
"""The lines of a bridge to a merged adapter; its reference is the adapter before it is merged."""


def titans() -> Layer:
    """Make a neural memory of width 16 that learns in chunks of 4 tokens."""
    import torch
    from titans_pytorch import NeuralMemory

    torch.manual_seed(0)
    memory = NeuralMemory(dim=16, chunk_size=4)

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        return memory(torch.as_tensor(x), state=state)

    return Layer(call)


def dynamic_chunking() -> Layer:
    """Make a chunker of width 16 whose chunks go back to tokens as they are."""
    import torch
    from h_net_dynamic_chunking import DynamicSequenceChunker

    torch.manual_seed(0)
    chunker = DynamicSequenceChunker(16)

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        shorter, upsample, *_ = chunker(torch.as_tensor(x))
        return upsample(shorter), None

    return Layer(call)


def flex_attention() -> Layer:
    """Make causal attention of one head of 8 within documents."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        q, k, v = (z[:, None] for z in torch.as_tensor(x).split(8, -1))
        ids = torch.tensor(np.ones(x.shape[:2], int) if documents is None else documents)
        seen = lambda b, h, t, s: (t >= s) & (ids[b, t] == ids[b, s])  # noqa: E731
        mask = create_block_mask(seen, len(x), None, x.shape[1], x.shape[1], device="cpu")
        return flex_attention(q, k, v, block_mask=mask)[:, 0], None

    def reference(x: Any) -> Any:
        q, k, v = np.split(x, 3, -1)
        scores = np.einsum("btd,bsd->bts", q, k) / 8**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tri(x.shape[1])
        return weights / weights.sum(-1, keepdims=True) @ v

    return Layer(call, reference=reference)


def chunked_delta_rule() -> Layer:
    """Make Qwen3-Next's gated delta rule, one head of 4."""
    import torch
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        q, k, v, g, b = torch.as_tensor(x)[:, :, None].split([4, 4, 4, 1, 1], -1)
        gates = -torch.nn.functional.softplus(g[..., 0]), b[..., 0].sigmoid()
        return rule(
            q, k, v, *gates, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    def reference(x: Any) -> Any:
        q, k, v, g, b = np.split(x, [4, 8, 12, 13], -1)
        q, k = (z / np.sqrt((z * z).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
        decay, b, s, y = 1 / (1 + np.exp(g)), 1 / (1 + np.exp(-b)), np.zeros((len(x), 4, 4)), []
        for t in range(x.shape[1]):
            s = s * decay[:, t, None]
            new = b[:, t] * (v[:, t] - (k[:, t, :, None] * s).sum(1))
            s = s + k[:, t, :, None] * new[:, None]
            y.append((q[:, t, :, None] * s).sum(1) / 2)
        return np.stack(y, 1)[:, :, None]

    return Layer(call, reference=reference)


def byte_latent_transformer() -> Layer:
    """Make a small BLT with patches of at most 4 bytes; bytes are made of the one number of a token."""
    import torch
    import transformers

    torch.manual_seed(0)
    part = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    local = {**part, "hidden_size_global": 16}
    whole = {"encoder_config": local, "decoder_config": local, "global_config": part}
    config = transformers.BltConfig(
        **whole, patch_in_forward=False, patching_mode="static", max_patch_length=4
    )
    model = transformers.BltModel(config).eval()

    def call(x: Any, documents: Any = None, state: Any = None) -> Any:
        ids = torch.as_tensor(np.asarray(abs(x[..., 0]) * 64, int) % 256)
        found = model(input_ids=ids, cache=state, use_cache=state is not None)
        return found.last_hidden_state, state

    def start(rows: int) -> Any:
        return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())

    return Layer(call, start=start)


def _merged(config: str, options: str, title: str) -> Subject:
    return Subject(
        name=f"peft: merged {title}",
        make=MERGED.substitute(config=config, options=options),
        width=16,
        promises=frozenset(("values", "batch", "dtype")),
        lengths=(1, 5),
        peer="peft",
        called=f"get_peft_model(model, {config}Config({options})).merge_and_unload()",
    )


subjects = (
    Subject(
        name="transformers: Qwen3-Next's gated delta rule",
        make=chunked_delta_rule,
        width=14,
        promises=STREAMED | {"decays", "values"},
        decays=slice(12, 13),
        peer="transformers",
        called="torch_chunk_gated_delta_rule(use_qk_l2norm_in_kernel=True)",
    ),
    Subject(
        name="transformers: BLT",
        make=byte_latent_transformer,
        width=1,
        promises=frozenset(["causal", "lengths", "batch", "state", "any_split"]),
        lengths=(1, 2, 3, 5, 9, 17),
        peer="transformers",
        called="BltModel(config)(input_ids, cache)",
    ),
    Subject(
        name="PyTorch: FlexAttention",
        make=flex_attention,
        width=24,
        promises=frozenset(["causal", "lengths", "batch", "documents", "dtype", "values"]),
        peer="torch",
        called="flex_attention(q, k, v, block_mask=create_block_mask(documents))",
    ),
    Subject(
        name="titans-pytorch: NeuralMemory",
        make=titans,
        width=16,
        promises=frozenset(["causal", "lengths", "batch", "state", "gradients", "dtype"]),
        lengths=(1, 2, 3, 5, 8, 17, 33),
        peer="titans-pytorch",
        called="NeuralMemory(dim=16, chunk_size=4)(seq, state)",
    ),
    Subject(
        name="h-net-dynamic-chunking",
        make=dynamic_chunking,
        width=16,
        promises=frozenset(["causal", "lengths", "batch", "dtype"]),
        peer="h-net-dynamic-chunking",
        called="DynamicSequenceChunker(16)(tokens)",
    ),
    _merged("Lora", "r=4", "LoRA"),
    _merged("Lora", "r=4, use_dora=True", "DoRA"),
    _merged("LoHa", "r=4", "LoHa"),
    _merged("LoKr", "r=4", "LoKr"),
    _merged("OFT", "oft_block_size=4", "OFT"),
    _merged("IA3", "feedforward_modules=[]", "IA3"),
)
