"""Makes the fixtures: random `BltForCausalLM`s of a few kilobytes, and what transformers makes of some bytes.

    python -m venv .venv-hf && .venv-hf/bin/python -m pip install torch transformers
    .venv-hf/bin/python tests/interchange/make_hf_blt.py tests/interchange/hf_blt

It needs torch and transformers, and nothing of jaxblt, so that it runs where jaxblt is not installed.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, HEADS, KV_HEADS, BYTES, WINDOW = 16, 2, 1, 32, 12
"""The window is shorter than the rows, so that it is seen to act."""

LENGTHS = (1, 2, 13, 32)
"""Bytes of the rows that are read by themselves."""

PART = {"num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 24}
LOCAL = PART | {"hidden_size": WIDTH}

MODELS = {
    "each": {
        "reads": {"cross_attn_k": 2},
        "encoder": LOCAL | {"cross_attn_all_layers": False},
        "decoder": LOCAL | {"cross_attn_all_layers": True},
        "global": 2 * WIDTH,
        "settings": {
            "encoder_hash_byte_group_size": [3, 4],
            "max_patch_length": 5,
            "patching_threshold": 5.13,
        },
    },
    "once": {
        "reads": {"cross_attn_k": 3},
        "encoder": LOCAL | {"cross_attn_all_layers": True, "num_key_value_heads": KV_HEADS},
        "decoder": LOCAL | {"cross_attn_all_layers": False, "num_key_value_heads": KV_HEADS},
        "global": 20,
        "settings": {
            "encoder_hash_byte_group_size": [2, 3, 8],
            "encoder_hash_byte_group_nb_functions": 2,
            "max_patch_length": None,
            "patching_threshold": 4.97,
        },
    },
}
"""Models: bytes read patches in each layer of the decoder or once, patches enter as they are or projected."""


def build(reads: dict[str, int], encoder: Any, decoder: Any, width: int, settings: Any) -> Any:
    """The model, with weights of unit gain, so that its entropies differ from byte to byte."""
    from transformers import BltConfig, BltForCausalLM

    local = reads | {"hidden_size_global": width}
    config = BltConfig(
        **reads,
        **settings,
        encoder_hash_byte_group_vocab=16,
        local_attention_window_len=WINDOW,
        encoder_config=encoder | local,
        decoder_config=decoder | local,
        global_config=PART | {"hidden_size": width, "num_key_value_heads": KV_HEADS},
        patcher_config=PART
        | {"hidden_size": WIDTH, "num_key_value_heads": KV_HEADS, "sliding_window": WINDOW},
    )
    model = BltForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    for _, p in sorted(model.named_parameters()):
        noise = rng.standard_normal(p.shape)
        drawn = noise / p.shape[-1] ** 0.5 if p.ndim > 1 else 1 + 0.3 * noise
        p.data.copy_(p.data.new_tensor(drawn.tolist()))
    return model


def answers(model: Any) -> dict[str, np.ndarray]:
    """Ids, and for them the patcher's logits, entropies and patch lengths, and logits of the whole model.

    Logits are of both rows as a batch, and of the beginning of the first row by itself. Behind it 8 bytes are drawn
    greedily, by reading the whole row again for each.
    """
    rng = np.random.default_rng(1)
    ids = rng.integers(4, 260, (2, BYTES))
    ids[:, 0] = 1
    tensor = model.lm_head.weight.new_tensor(ids.tolist()).long()
    config = model.config
    told = {"patch_size": config.patch_size, "threshold": config.patching_threshold}
    entropies, lengths, logits = model.model.patcher(tensor, max_patch_length=config.max_patch_length, **told)
    found = {"patcher_logits": logits, "entropies": entropies, "patch_lengths": lengths}
    found["logits"] = model(input_ids=tensor, use_cache=False).logits
    for length in LENGTHS:
        found[f"logits_{length}"] = model(input_ids=tensor[:1, :length], use_cache=False).logits
    row = tensor[:1, : LENGTHS[-2]]
    for _ in range(8):
        last = model(input_ids=row, use_cache=False).logits[:, -1:, 4:]
        row = row.new_tensor([[*row[0].tolist(), 4 + int(last.argmax())]])
    found["greedy"] = row[:, LENGTHS[-2] :]
    return {"ids": ids.astype(np.int32)} | {name: x.detach().numpy() for name, x in found.items()}


def main(folder: Path) -> None:
    from safetensors.numpy import save_file

    for name, parts in MODELS.items():
        model = build(parts["reads"], parts["encoder"], parts["decoder"], parts["global"], parts["settings"])
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink()
        found = {name: np.ascontiguousarray(x) for name, x in answers(model).items()}
        save_file(found, folder / name / "expected.safetensors")
        print(", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in found.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
