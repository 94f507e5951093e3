"""The models of recall over a gap: memories, the same without their reads, and mixers without a memory."""

from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.training.flops import count_params

if TYPE_CHECKING:
    from experiments.benchmark.gap_recall import Settings
    from jaxblt.models import ByteLMConfig

PATTERNS = {
    "mac": "C",
    "mag": "J",
    "mal": "KW",
    "slots": "BW",
    "window": "W",
    "hyena": "H",
    "delta": "D",
    "attention": "A",
}
"""Stacks: four with a memory, the last of which is a bank of slots; attention over a window, modal Hyena, Gated
DeltaNet, full attention."""

READS: dict[str, tuple[str, ...]] = {
    "mac": ("context_key", "context_value", "gate_query"),
    "mag": ("memory", "readout", "out"),
}
"""Parameters that a read of the memory passes, held at zero to hide it: all but MAC then add zeros.

MAC attends to keys and values of zero, and has a gate of one half.
"""
READS["mal"] = READS["slots"] = READS["mag"][1:]


def model_of(name: str, settings: "Settings", vocab_size: int, mlp_dim: int) -> "ByteLMConfig":
    """The config of a model with MLPs of that width."""
    from jaxblt.mixers import (
        AttentionConfig,
        GatedDeltaNetConfig,
        MACConfig,
        MAGConfig,
        NeuralMemoryConfig,
        SlotMemoryConfig,
    )
    from jaxblt.models import ByteLMConfig, StackConfig

    dim, heads = settings.dim, settings.heads
    memory: Any = {"chunk_size": settings.chunk, "packed": False}
    mixers = {
        "C": MACConfig(dim, heads, **memory),
        "J": MAGConfig(dim, heads, window=max(settings.window, settings.chunk), **memory),
        "K": NeuralMemoryConfig(dim, heads, **memory),
        "B": SlotMemoryConfig(dim, heads, interval=min(8, settings.window), packed=False),
        "W": AttentionConfig(dim, heads, window=settings.window, packed=False),
        "D": GatedDeltaNetConfig(dim, heads),
        "A": AttentionConfig(dim, heads, packed=False),
    }
    pattern = PATTERNS[name]
    used = {letter: mixers[letter] for letter in pattern if letter in mixers}
    stack = StackConfig(dim=dim, num_layers=settings.layers, pattern=pattern, mixers=used, mlp_dim=mlp_dim)
    return ByteLMConfig(stack=stack, vocab_size=vocab_size)


def equal_models(names: tuple[str, ...], settings: "Settings", vocab_size: int) -> dict[str, "ByteLMConfig"]:
    """Models of nearly equal numbers of parameters: the widths of their MLPs make up for what their mixers have.

    The largest mixers have MLPs of twice the model's width.
    """
    sizes = {}
    for name in names:
        few, many = (_parameters(model_of(name, settings, vocab_size, width)) for width in (8, 16))
        sizes[name] = (2 * few - many, (many - few) / 8)
    largest = max(fixed + 2 * settings.dim * each for fixed, each in sizes.values())
    return {
        name: model_of(name, settings, vocab_size, round((largest - fixed) / each))
        for name, (fixed, each) in sizes.items()
    }


def held(name: str, params: Any, *, off: bool) -> Any:
    """1 for parameters that are trained, 0 for those that are held at zero so that no read of the memory is seen."""
    path = READS.get(name, ())

    def factor(where: Any, leaf: Any) -> Any:
        parts = [part.key for part in where]
        passes = parts[-1] in path or all(part in parts for part in path)
        return jnp.full(leaf.shape, 0 if off and path and passes else 1, leaf.dtype)

    return jax.tree_util.tree_map_with_path(factor, params)


def _parameters(model: "ByteLMConfig") -> int:
    shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return count_params(nn.meta.unbox(shapes["params"]))[0]
