"""A tiny HyenaDNA whose weights are drawn alike for the definition and for jaxblt."""

from collections.abc import Mapping

import numpy as np

WIDTH, LAYERS, HIDDEN, TAPS, FEATURES, UNITS, INNER, ROWS = 12, 2, 20, 700, 5, 8, 2, 16
CONFIG = {
    "model_type": "hyenadna",
    "vocab_size": 12,
    "d_model": WIDTH,
    "d_inner": HIDDEN,
    "n_layer": LAYERS,
    "max_seq_len": TAPS,
    "emb_dim": FEATURES,
    "filter_order": UNITS,
    "num_inner_mlps": INNER,
    "activation_freq": 10,
    "tie_word_embeddings": False,
}
"""The settings of the tiny model, as a config file has them."""

LENGTHS = (1, 2, 7, 128, 513, 700)
ROOT = "hyena.backbone."


def shapes() -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors, as the published class has them; the sines' frequency once."""
    mixer = {
        "in_proj.weight": (3 * WIDTH, WIDTH),
        "in_proj.bias": (3 * WIDTH,),
        "short_filter.weight": (3 * WIDTH, 1, 3),
        "short_filter.bias": (3 * WIDTH,),
        "out_proj.weight": (WIDTH, WIDTH),
        "out_proj.bias": (WIDTH,),
        "filter_fn.bias": (WIDTH,),
        "filter_fn.pos_emb.z": (1, TAPS, FEATURES),
        "filter_fn.pos_emb.t": (1, TAPS, 1),
        "filter_fn.modulation.deltas": (1, 1, WIDTH),
        "filter_fn.implicit_filter.1.freq": (1, UNITS),
        f"filter_fn.implicit_filter.{2 * (INNER + 1)}.weight": (WIDTH, UNITS),
    }
    for i in range(INNER + 1):
        mixer[f"filter_fn.implicit_filter.{2 * i}.weight"] = (UNITS, UNITS if i else FEATURES)
        mixer[f"filter_fn.implicit_filter.{2 * i}.bias"] = (UNITS,)
    block = {f"mixer.{name}": shape for name, shape in mixer.items()}
    for name in ("norm1", "norm2"):
        block |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    block |= {"mlp.fc1.weight": (HIDDEN, WIDTH), "mlp.fc1.bias": (HIDDEN,)}
    block |= {"mlp.fc2.weight": (WIDTH, HIDDEN), "mlp.fc2.bias": (WIDTH,)}
    found: dict[str, tuple[int, ...]] = {"lm_head.weight": (ROWS, WIDTH)}
    found |= {f"{ROOT}embeddings.word_embeddings.weight": (ROWS, WIDTH)}
    found |= {f"{ROOT}ln_f.weight": (WIDTH,), f"{ROOT}ln_f.bias": (WIDTH,)}
    return found | {f"{ROOT}layers.{i}.{n}": shape for i in range(LAYERS) for n, shape in block.items()}


def draw(made: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """Return the checkpoint in fp32: each tensor by a seed of its own place in the alphabet."""
    known = shapes() if made is None else made
    return {
        name: _tensor(name, known[name], np.random.default_rng([58, i])).astype(np.float32)
        for i, name in enumerate(sorted(known))
    }


def _tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(shape)
    if name.endswith("pos_emb.t"):
        return np.linspace(0, 1, shape[1])[None, :, None]
    if name.endswith("deltas"):
        return np.linspace(np.log(1e-2) / 1.5, np.log(1e-2) / 0.3, shape[2])[None, None]
    if name.endswith("pos_emb.z"):
        # Not the features of a formula: training moves them
        steps, bands = (
            np.arange(shape[1])[:, None],
            np.linspace(1e-4, (shape[2] - 3) / 2, (shape[2] - 1) // 2),
        )
        angle = bands * steps * 2 * np.pi / shape[1]
        z = np.concatenate([steps / (shape[1] - 1), np.cos(angle), -np.sin(angle)], 1)
        return (z + 0.01 * noise[0])[None]
    if name.endswith("freq"):
        return 10 + noise
    if "norm" in name or "ln_f" in name:
        return (1 if name.endswith("weight") else 0) + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "implicit_filter" in name and shape[0] == UNITS:
        return 0.2 * noise
    return noise / shape[-1] ** 0.5


def draw_bases(length: int) -> np.ndarray:
    """Return a row of the tokenizer's ids: bases, N, and [UNK] for what it does not know."""
    return np.random.default_rng(length).choice([6, 7, 8, 9, 10, 11], length, p=[0.04, *[0.23] * 4, 0.04])


def to_text(ids: np.ndarray) -> bytes:
    """Return the bytes of a row; [UNK] is R."""
    return np.frombuffer(b"RACGTN", np.uint8)[ids - 6].tobytes()
