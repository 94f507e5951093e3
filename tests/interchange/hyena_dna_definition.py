"""What the definition of HyenaDNA gives for drawn weights, written out plainly in float64: numpy alone."""

import math
from functools import cache

import numpy as np

from tests.interchange import hyena_dna_weights as weights


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


@cache
def expected(length: int) -> tuple[list[np.ndarray], np.ndarray, float]:
    """Hidden states, logits and log-likelihood of a drawn row."""
    ids = weights.draw_bases(length)
    states, logits = run({name: x.astype(np.float64) for name, x in weights.draw().items()}, ids)
    return states, logits, likely(logits, ids)
