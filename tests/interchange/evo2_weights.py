"""Weights that are drawn alike for the reference and for jaxblt: numpy alone, as either imports it."""

from collections.abc import Mapping

import numpy as np

WIDTH, HEADS, HIDDEN, GROUPS, MODES, VOCAB = 16, 2, 24, 4, 16, 512
THETA, SCALE = 1e4, 4.0
CASES = {"short": "S", "medium": "M", "modal": "H", "attention": "A", "mixed": "SMHAS"}
"""Patterns: a tiny model of each kind of block, and one of all."""

LENGTHS = (1, 7, 127, 128, 129, 1000)
ROUNDED = {"short": 0.0130, "medium": 0.0155, "modal": 0.0114, "attention": 0.0123, "mixed": 0.0405}
"""How far the reference's logits in bf16 lie from its own in fp32, as make_evo2.py prints it."""

KEPT = 3
"""Positions at the end of a row whose values are kept."""

PROMPTS, STEPS = (6, 128), 48
"""Bytes of the prompts that greedy bytes follow, and how many follow."""


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return a checkpoint by the reference's names, in fp32: each tensor by a seed of its own place in the alphabet."""
    return {
        name: _tensor(name, shapes[name], np.random.default_rng([seed, i])).astype(np.float32)
        for i, name in enumerate(sorted(shapes))
    }


def _tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name.endswith("inv_freq"):
        return THETA ** (-np.arange(0, 2 * shape[0], 2) / (2 * shape[0]))
    if name.endswith("log_poles"):
        return -np.exp(rng.uniform(np.log(1 / 500), np.log(2.0), shape))
    noise = rng.standard_normal(shape)
    if name.endswith("scale"):
        return 1 + 0.2 * noise
    # So small that it matters where a norm adds its epsilon
    if name.startswith("embedding"):
        return 0.02 * noise
    if name.endswith(("bias", ".D")):
        return 0.3 * noise
    if name.endswith("residues"):
        return 0.1 * noise
    return noise / shape[-1] ** 0.5


def draw_bytes(length: int, seed: int = 0) -> np.ndarray:
    """Return a row of bytes as the reference reads them, behind its end-of-document id 0."""
    ids = np.random.default_rng(seed).choice(np.frombuffer(b"ACGTNacgt|@", np.uint8), length)
    ids[0] = 0
    return ids.astype(np.int64)
