"""Makes the fixture: what the reference computes with drawn weights, and the names and shapes of released models.

    python -m venv .venv-vtx && .venv-vtx/bin/python -m pip install torch numpy einops tqdm pyyaml rich
    .venv-vtx/bin/python -m pip install --no-deps vtx==1.1.0 evo2==0.6.0
    .venv-vtx/bin/python tests/interchange/make_evo2.py tests/interchange/evo2

It needs torch on a CPU, and nothing of jaxblt. Triton and flash-attn are not needed: the one function that the
reference has in Triton alone is replaced by its own in torch.
"""

import contextlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import evo2_weights as weights

CONFIGS = {
    "evo2_1b_8k": "evo2-1b-8k",
    "evo2_7b_8k": "evo2-7b-8k",
    "evo2_7b_262k": "evo2-7b-262k",
    "evo2_7b_1m": "evo2-7b-1m",
    "evo2_20b_1m": "evo2-20b-1m",
    "evo2_40b_8k": "evo2-40b-8k",
    "evo2_40b_1m": "evo2-40b-1m",
}
MARGIN = 1e-3
"""By how much the greedy byte must lead, in units of the logits' root mean square."""


def reference() -> Any:
    """Import the reference without its kernels and without a GPU."""
    names = ("vortex.ops", "vortex.ops.embedding", "vortex.ops.embedding.rotary")
    sys.modules |= {name: types.ModuleType(name) for name in names}
    sys.modules[names[-1]].apply_rotary = None  # type: ignore[attr-defined]
    import torch
    import vortex.model.rotary as rotary
    from vortex.model import model

    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment]

    def turned(qkv: Any, cos: Any, sin: Any, *_: Any, **options: Any) -> Any:
        turn = lambda x: rotary.apply_rotary_emb_torch(x, cos[: x.shape[1]], sin[: x.shape[1]])  # noqa: E731
        return torch.stack([turn(qkv[:, :, 0]), turn(qkv[:, :, 1]), qkv[:, :, 2]], 2)

    rotary.apply_rotary_emb_qkv_ = turned
    return model


def settings(name: str) -> Any:
    """A released model's settings, without Transformer Engine and flash-attn."""
    import yaml
    from vortex.model.utils import dotdict

    # Read the file without its package, which needs more than is installed
    found = importlib.util.find_spec("evo2")
    (folder,) = found.submodule_search_locations
    file = Path(folder) / "configs" / f"{CONFIGS[name]}.yml"
    return dotdict(
        yaml.safe_load(file.read_text()) | {"use_fp8_input_projections": False, "use_flash_attn": False}
    )


def tiny(pattern: str) -> Any:
    """Settings of a tiny model, in fp32."""
    import torch

    config = settings("evo2_7b_1m")
    kinds = {"S": "hcs_layer_idxs", "M": "hcm_layer_idxs", "H": "hcl_layer_idxs", "A": "attn_layer_idxs"}
    config.update({kinds[c]: [i for i, k in enumerate(pattern) if k == c] for c in kinds})
    sizes = {"hidden_size": weights.WIDTH, "num_filters": weights.WIDTH, "inner_mlp_size": weights.HIDDEN}
    groups = {"hcm_filter_groups": weights.GROUPS, "hcs_filter_groups": weights.GROUPS}
    names = ("attn_block_dtype", "hyena_block_dtype", "mlp_dtype", "params_dtype")
    config.update(sizes | groups | dict.fromkeys(names, torch.float32))
    config.update(num_layers=len(pattern), num_attention_heads=weights.HEADS)
    config.update(rotary_emb_base=weights.THETA, rotary_emb_scaling_factor=weights.SCALE)
    return config


def answers(model: Any, pattern: str, seed: int) -> dict[str, np.ndarray]:
    """Last hidden states of each block, last logits, and log-likelihoods, at each length; greedy bytes."""
    import torch

    net = model.StripedHyena(tiny(pattern)).float().eval()
    shapes = {name: tuple(x.shape) for name, x in net.state_dict().items()}
    drawn = weights.draw(shapes, seed)
    net.custom_load_state_dict({name: torch.from_numpy(x.copy()) for name, x in drawn.items()})
    found: dict[str, np.ndarray] = {}
    states: list[Any] = []
    for block in net.blocks:
        block.register_forward_hook(lambda module, args, result: states.append(result[0]))

    def run(ids: np.ndarray) -> Any:
        states.clear()
        for block in net.blocks:
            if hasattr(block, "filter"):
                block.filter.t = None
        return net(torch.from_numpy(ids)[None])[0][0]

    with torch.no_grad():
        for length in weights.LENGTHS:
            ids = weights.draw_bytes(length)
            logits = run(ids)
            last = [x[0, -weights.KEPT :].numpy() for x in states]
            likely = torch.log_softmax(logits, -1)[:-1].gather(1, torch.from_numpy(ids[1:])[:, None]).sum()
            found |= {f"hidden_{length}": np.stack(last), f"likely_{length}": likely.numpy()}
            found[f"logits_{length}"] = logits[-1, :: 1 if len(pattern) > 1 else 8].numpy()
        for prompt in weights.PROMPTS if len(pattern) > 1 else ():
            found[f"greedy_{prompt}"] = greedy(run, weights.draw_bytes(prompt + 1))
    return found


def greedy(run: Any, ids: np.ndarray) -> np.ndarray:
    """Likeliest bytes behind a prompt, each from the whole row anew."""
    start = len(ids)
    for _ in range(weights.STEPS):
        logits = run(ids)[-1].numpy()
        best = np.sort(logits[2:256])[-2:]
        assert best[1] - best[0] > MARGIN * np.sqrt(np.mean(logits**2)), "a tie: take another seed"
        ids = np.append(ids, 2 + int(np.argmax(logits[2:256])))
    return ids[start:].astype(np.uint8)


def rounding(model: Any, pattern: str, seed: int) -> float:
    """How far logits in bf16, as the reference loads weights, lie from those in fp32: relative root mean square."""
    import torch

    logits = []
    for narrow in (False, True):
        config = tiny(pattern)
        if narrow:
            names = ("attn_block_dtype", "hyena_block_dtype", "mlp_dtype", "params_dtype")
            config.update(dict.fromkeys(names, torch.bfloat16))
        net = model.StripedHyena(config).eval()
        net = net if narrow else net.float()
        shapes = {name: tuple(x.shape) for name, x in net.state_dict().items()}
        drawn = {name: torch.from_numpy(x) for name, x in weights.draw(shapes, seed).items()}
        if narrow:
            net.to_bfloat16_except_pr_lc(to_float32=True)
        net.custom_load_state_dict(drawn)
        if narrow:
            net.to_bfloat16_except_pr_lc()
        with torch.no_grad():
            ids = torch.from_numpy(weights.draw_bytes(max(weights.LENGTHS)))[None]
            logits.append(net(ids)[0].float())
    return float((logits[1] - logits[0]).norm() / logits[0].norm())


def released(model: Any, name: str) -> list[Any]:
    """Names and shapes of a released model: those of blocks once for all blocks that have them, then the others."""
    import torch

    shim = types.SimpleNamespace(**vars(torch))
    shim.device = lambda *_: torch.device("meta")
    with mock.patch.object(model, "torch", shim), mock.patch.object(model, "move_to_device"):
        net = model.StripedHyena(settings(name))
    blocks: dict[str, list[int]] = {}
    others = {}
    for key, x in net.state_dict().items():
        room, _, rest = key.partition(".")
        if room != "blocks":
            others[key] = list(x.shape)
            continue
        number, _, inner = rest.partition(".")
        blocks.setdefault(json.dumps([inner, list(x.shape)]), []).append(int(number))
    kinds: dict[str, dict[str, list[int]]] = {}
    for told, numbers in blocks.items():
        inner, shape = json.loads(told)
        kinds.setdefault(json.dumps(numbers), {})[inner] = shape
    return [*([json.loads(numbers), shapes] for numbers, shapes in kinds.items()), [None, others]]


def saved(file: Path) -> None:
    """Write a checkpoint of torch with all that is read: views, parameters, and state that is left out."""
    import io

    import torch

    state = torch.nn.Linear(2, 2).state_dict()
    numbers = torch.arange(6.0)
    state["weight"], state["bias"] = numbers.reshape(2, 3)[:, 1:], torch.nn.Parameter(numbers[:2])
    state["turned"], state["half"] = numbers.reshape(2, 3).T, numbers.to(torch.bfloat16)
    state["inner._extra_state"] = io.BytesIO(b"fp8")
    torch.save(state, file)


def main(folder: Path) -> None:
    logging.disable()
    folder = folder.absolute()
    folder.mkdir(exist_ok=True)
    # The reference writes a log where it is imported
    os.chdir(tempfile.mkdtemp())
    model = reference()
    for seed, (case, pattern) in enumerate(weights.CASES.items()):
        found = answers(model, pattern, seed)
        np.savez_compressed(folder / f"{case}.npz", **found)
        print(case, {name: x.shape for name, x in found.items()})
        print(case, "in bf16", rounding(model, pattern, seed))
    saved(folder / "torch.pt")
    names = {name: released(model, name) for name in CONFIGS}
    lines = [f"{json.dumps(name)}: {json.dumps(told, separators=(',', ':'))}" for name, told in names.items()]
    (folder / "names.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
