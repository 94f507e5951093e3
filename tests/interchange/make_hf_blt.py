"""Makes the fixture: a random `BltForCausalLM` of a few kilobytes, and what transformers makes of some bytes.

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


def build() -> Any:
    """The model, with weights of unit gain, so that its entropies differ from byte to byte."""
    from transformers import BltConfig, BltForCausalLM

    part = {"num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 24}
    local = part | {"hidden_size": WIDTH, "hidden_size_global": 2 * WIDTH, "cross_attn_k": 2}
    config = BltConfig(
        encoder_hash_byte_group_vocab=16,
        encoder_hash_byte_group_size=[3, 4],
        patching_threshold=5.13,
        max_patch_length=5,
        local_attention_window_len=WINDOW,
        encoder_config=local,
        decoder_config=local,
        global_config=part | {"hidden_size": 2 * WIDTH, "num_key_value_heads": KV_HEADS},
        patcher_config=part
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
    """Ids, and for them the patcher's logits, entropies and patch lengths, and what enters and leaves the stack."""
    rng = np.random.default_rng(1)
    ids = rng.integers(4, 260, (2, BYTES))
    ids[:, 0] = 1
    found: dict[str, np.ndarray] = {"ids": ids.astype(np.int32)}

    def keep(module: Any, args: Any, options: Any, result: Any) -> None:
        found["global_in"] = options["inputs_embeds"].detach().numpy()
        found["global_out"] = result.detach().numpy()

    hook = model.model.global_transformer.register_forward_hook(keep, with_kwargs=True)
    tensor = model.lm_head.weight.new_tensor(ids.tolist()).long()
    model(input_ids=tensor, use_cache=False)
    hook.remove()
    config = model.config
    told = {"patch_size": config.patch_size, "threshold": config.patching_threshold}
    entropies, lengths, logits = model.model.patcher(tensor, max_patch_length=config.max_patch_length, **told)
    names = {"patcher_logits": logits, "entropies": entropies, "patch_lengths": lengths}
    return found | {name: x.detach().numpy() for name, x in names.items()}


def main(folder: Path) -> None:
    from safetensors.numpy import save_file

    model = build()
    model.save_pretrained(folder)
    found = {name: np.ascontiguousarray(x) for name, x in answers(model).items()}
    save_file(found, folder / "expected.safetensors")
    print(", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in found.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
