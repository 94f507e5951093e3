"""The models of recall over a gap: memories, the same without their reads, and mixers without a memory."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.benchmark.memory.gap_settings import MEMORIES, Settings
from jaxblt.training.flops import count_params

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig

PATTERNS: dict[str, tuple[str, ...]] = {
    "mac": ("mac",),
    "mag": ("mag",),
    "mal": ("neural_memory", "window"),
    "slots": ("slot_memory", "window"),
    "window": ("window",),
    "hyena": ("hyena",),
    "delta": ("gated_delta_net",),
    "engine": ("state_engine",),
    "levels": ("state_levels",),
    "attention": ("hyena_short", "attention"),
    "sparse": ("hyena_short", "sparse_attention"),
}
"""Stacks: four with a memory, the last of which is a bank of slots; attention over a window, modal Hyena, Gated
DeltaNet, state engines of one level and of three, full attention, attention to blocks that each token chooses. The last
two have a short convolution before them, as the streams of the others have: without one attention has to learn first
which symbol stands in front of another, and had not after 1,600 steps."""

NO_TURN = 1e12
"""Base of rotary phases, half of which turn by less than a radian over a million positions."""

LEVELS = (32, 16, 8)
"""Slots of each level; as many in one for the engine without levels."""
READS: dict[str, tuple[str, ...]] = {
    "mac": ("context_key", "context_value", "gate_query", "retrieved_scale"),
    "mag": ("memory", "readout", "out"),
}
"""Parameters that a read of the memory passes, held at zero to hide it: all but MAC then add zeros.

MAC attends to keys and values of zero, and has a gate of one half.
"""
READS["mal"] = READS["slots"] = READS["mag"][1:]


def model_of(name: str, settings: Settings, vocab_size: int, mlp_dim: int) -> "ByteLMConfig":
    """Return the config of a model with MLPs of that width."""
    from jaxblt.mixers import (
        AttentionConfig,
        GatedDeltaNetConfig,
        MACConfig,
        MAGConfig,
        NeuralMemoryConfig,
        SlotMemoryConfig,
        SparseAttentionConfig,
        StateEngineConfig,
    )
    from jaxblt.models import ByteLMConfig, StackConfig

    dim, heads = settings.dim, settings.heads
    memory: Any = {"chunk_size": settings.chunk, "packed": False}
    mixers = {
        "mac": MACConfig(dim, heads, **memory),
        "mag": MAGConfig(dim, heads, window=max(settings.window, settings.chunk), **memory),
        "neural_memory": NeuralMemoryConfig(dim, heads, **memory),
        "slot_memory": SlotMemoryConfig(dim, heads, interval=min(8, settings.window), packed=False),
        "window": AttentionConfig(dim, heads, window=settings.window, packed=False),
        "gated_delta_net": GatedDeltaNetConfig(dim, heads),
        "state_engine": StateEngineConfig(dim, heads, num_slots=sum(LEVELS)),
        "state_levels": StateEngineConfig(dim, heads, levels=LEVELS),
        # Leave out positions: rotary phases of gaps beyond training are new to it
        "attention": AttentionConfig(dim, heads, position="none", packed=False),
        "sparse_attention": SparseAttentionConfig(
            dim,
            heads,
            block=settings.block,
            top_k=settings.top_k,
            window=max(settings.window, settings.block),
            rope_theta=NO_TURN,
            predictor=settings.predictor,
        ),
    }
    # Cut only to get sizes: `check_gaps` refuses to train with fewer layers
    pattern = PATTERNS[name][: settings.layers]
    used = {word: mixers[word] for word in pattern if word in mixers}
    stack = StackConfig(dim=dim, num_layers=settings.layers, pattern=pattern, mixers=used, mlp_dim=mlp_dim)
    return ByteLMConfig(stack=stack, vocab_size=vocab_size)


def equal_models(names: tuple[str, ...], settings: Settings, vocab_size: int) -> dict[str, "ByteLMConfig"]:
    """Return models of nearly equal numbers of parameters, see `of_one_size`."""
    return of_one_size({name: partial(model_of, name, settings, vocab_size) for name in names}, settings.dim)


def of_one_size(models: dict[str, Callable[[int], "ByteLMConfig"]], dim: int) -> dict[str, "ByteLMConfig"]:
    """Return models of nearly equal size: the widths of their MLPs make up for what their mixers have.

    The largest mixers have MLPs of twice the model's width.

    Args:
      models: from the width of an MLP to the config.
      dim: the model's width.
    """
    sizes = {}
    for name, model in models.items():
        few, many = (_parameters(model(width)) for width in (8, 16))
        sizes[name] = (2 * few - many, (many - few) / 8)
    largest = max(fixed + 2 * dim * each for fixed, each in sizes.values())
    return {name: models[name](round((largest - fixed) / each)) for name, (fixed, each) in sizes.items()}


def check_gaps(names: tuple[str, ...], settings: Settings) -> None:
    """Raise ValueError for gaps that leave nothing to a memory, or fewer layers than a stack has kinds.

    Nothing is left where attention spans the gap, or no chunk ends before it. MAG's window is a chunk at least, and MAC
    attends to the whole of its segment.
    """
    spans = {"mag": max(settings.window, settings.chunk), "mac": settings.chunk}
    shortest = min(settings.tested) * settings.reach
    for name in names:
        if settings.layers < len(PATTERNS[name]):
            raise ValueError(
                f"{name} is layers of {' and '.join(PATTERNS[name])} in turn: raise --settings.layers to "
                f"{len(PATTERNS[name])}, got {settings.layers}"
            )
        seen = settings.layers * (spans.get(name, 1) - 1)
        if shortest < seen:
            raise ValueError(
                f"attention of {name} with chunks of {settings.chunk} sees {seen:,} symbols back, and the shortest gap "
                f"that is tested has {shortest:,}: raise --settings.tested, or leave {name} out"
            )
        if name in MEMORIES[:3] and 2 * settings.pairs + settings.least_gap < settings.chunk:
            raise ValueError(
                f"the first question of the shortest row stands at symbol {2 * settings.pairs + settings.least_gap:,}, "
                f"and {name} remembers nothing before its first chunk of {settings.chunk:,} ends: raise "
                "--settings.shortest"
            )


def held(name: str, params: Any, *, off: bool) -> Any:
    """Return 1 for parameters that are trained, 0 for those held at zero so that no read of the memory is seen."""
    path = READS.get(name, ())

    def factor(where: Any, leaf: Any) -> Any:
        parts = [part.key for part in where]
        passes = parts[-1] in path or all(part in parts for part in path)
        return jnp.full(leaf.shape, 0 if off and path and passes else 1, leaf.dtype)

    return jax.tree_util.tree_map_with_path(factor, params)


def _parameters(model: "ByteLMConfig") -> int:
    shapes = jax.eval_shape(model.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return count_params(nn.meta.unbox(shapes["params"]))[0]
