"""Makes the fixture: what the definition of HyenaDNA gives for drawn weights, written out plainly in float64.

    python tests/interchange/make_hyena_dna.py tests/interchange/hyena_dna.npz

It needs numpy alone, and nothing of jaxblt. With `--published FILE.py`, a copy of the modelling file that lies beside
the published weights, and torch and transformers, it compares itself with that and writes nothing.
"""

import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import hyena_dna_weights as weights


def normalise(x: np.ndarray, tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Layer norm with epsilon 1e-5."""
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def product(x: np.ndarray, tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A linear layer; one without a bias if the checkpoint has none."""
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)


def taps(tensors: dict[str, np.ndarray], length: int) -> np.ndarray:
    """The long filter's taps [T, D]: an MLP of sines over each lag's features, times a window."""
    hidden = tensors["pos_emb.z"][0, :length]
    for i in range(weights.INNER + 1):
        hidden = np.sin(
            tensors["implicit_filter.1.freq"] * product(hidden, tensors, f"implicit_filter.{2 * i}")
        )
    made = product(hidden, tensors, f"implicit_filter.{2 * (weights.INNER + 1)}")
    time, decay = tensors["pos_emb.t"][0, :length], np.abs(tensors["modulation.deltas"][0])
    return made * (np.exp(-time * decay) + 0.05)


def convolve(u: np.ndarray, h: np.ndarray) -> np.ndarray:
    """y_t = sum over lags of h_lag u_(t - lag), channel by channel; both [T, D]."""
    return np.stack([np.convolve(u[:, d], h[:, d])[: len(u)] for d in range(u.shape[1])], 1)


def mix(x: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The Hyena operator of order 2."""
    z = product(x, tensors, "in_proj")
    short = tensors["short_filter.weight"][:, 0, ::-1].T
    z = convolve(z, short) + tensors["short_filter.bias"]
    gate, inner, v = np.split(z, 3, axis=1)
    own = {n.removeprefix("filter_fn."): x for n, x in tensors.items() if n.startswith("filter_fn.")}
    u = v * inner
    y = convolve(u, taps(own, len(u))) + own["bias"] * u
    return product(y * gate, tensors, "out_proj")


def gelu(x: np.ndarray) -> np.ndarray:
    """The approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def run(tensors: dict[str, np.ndarray], ids: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Hidden states behind each block and behind the last norm, and logits."""
    backbone = {n.removeprefix(weights.ROOT): x for n, x in tensors.items()}
    x = backbone["embeddings.word_embeddings.weight"][ids]
    states = []
    for i in range(weights.LAYERS):
        block = {n.removeprefix(f"layers.{i}."): w for n, w in backbone.items()}
        mixer = {n.removeprefix("mixer."): w for n, w in block.items() if n.startswith("mixer.")}
        x = x + mix(normalise(x, block, "norm1"), mixer)
        y = gelu(product(normalise(x, block, "norm2"), block, "mlp.fc1"))
        x = x + product(y, block, "mlp.fc2")
        states.append(x)
    states.append(normalise(x, backbone, "ln_f"))
    return states, product(states[-1], backbone, "lm_head")


def likely(logits: np.ndarray, ids: np.ndarray) -> float:
    """The sum of log p of all tokens behind the first."""
    top = logits.max(-1, keepdims=True)
    logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return float(logs[np.arange(len(ids) - 1), ids[1:]].sum())


def published(file: Path) -> Any:
    """The published class with the drawn weights."""
    import torch
    from transformers import PretrainedConfig

    class HyenaConfig(PretrainedConfig):
        model_type = "hyenadna"

    folder = types.ModuleType("hyena_files")
    folder.__path__ = []
    settings = types.ModuleType("hyena_files.configuration_hyena")
    settings.HyenaConfig = HyenaConfig  # type: ignore[attr-defined]
    sys.modules |= {"hyena_files": folder, "hyena_files.configuration_hyena": settings}
    spec = importlib.util.spec_from_file_location("hyena_files.modeling_hyena", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rest = {"use_bias": True, "train_freq": True, "hyena_order": 2, "short_filter_order": 3}
    rest |= {"embed_dropout": 0.0, "hyena_dropout": 0.0, "hyena_filter_dropout": 0.0}
    rest |= {"layer_norm_epsilon": 1e-5, "pad_vocab_size_multiple": 8}
    net = module.HyenaDNAForCausalLM(HyenaConfig(**weights.CONFIG, **rest)).double().eval()
    tensors = {name: torch.from_numpy(x).double() for name, x in weights.draw().items()}
    missing, unexpected = net.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("freq") for name in missing), missing
    return net


def compare(file: Path) -> None:
    """Print by how much the published class differs from this file."""
    import torch

    net, tensors = published(file), {name: x.astype(np.float64) for name, x in weights.draw().items()}
    for length in weights.LENGTHS:
        ids = weights.draw_bases(length)
        states, logits = run(tensors, ids)
        with torch.no_grad():
            found = net(torch.from_numpy(ids)[None], output_hidden_states=True, return_dict=True)
        worst = np.abs(found.logits[0].numpy() - logits).max()
        theirs = [x[0].numpy() for x in found.hidden_states[1:]]
        hidden = max(np.abs(a - b).max() for a, b in zip(theirs, states, strict=True))
        print(f"{length} tokens: logits differ by {worst:.1e}, states by {hidden:.1e}")


def main(file: Path) -> None:
    tensors = {name: x.astype(np.float64) for name, x in weights.draw().items()}
    found: dict[str, Any] = {}
    for length in weights.LENGTHS:
        ids = weights.draw_bases(length)
        states, logits = run(tensors, ids)
        found[f"hidden_{length}"] = np.stack([x[-weights.KEPT :] for x in states]).astype(np.float32)
        found[f"logits_{length}"] = logits[-weights.KEPT :].astype(np.float32)
        found[f"likely_{length}"] = np.float32(likely(logits, ids))
    np.savez_compressed(file, **found)
    print({name: np.shape(x) for name, x in found.items()})


if __name__ == "__main__":
    if sys.argv[1] == "--published":
        compare(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
