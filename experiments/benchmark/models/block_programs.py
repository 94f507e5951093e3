"""Blocks of a mixer and an MLP, and their programs on a row of some length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblt.models import StackConfig
    from jaxblt.profiling import Case, Method

PASSES = ("forward", "forward+backward")
STATES = (32, 64, 128, 256)
"""Slots of a head of the state engines T32, T64, T128 and T256."""


@dataclass(frozen=True)
class Setting:
    """The settings that all blocks of a measurement share.

    Attributes:
      dim: width.
      dtype: of the computation; parameters are held in bf16.
      trials: timed calls of each program.
      method: how they are timed.
    """

    dim: int
    dtype: str = "bfloat16"
    trials: int = 20
    method: "Method | None" = None


@dataclass(frozen=True)
class Block:
    """A mixer's programs at one length: by pass, with shapes in place of arguments, and what its products count."""

    flops: float
    cases: "dict[str, Case]"


def block(name: str, dim: int) -> "StackConfig":
    """Return one block of a mixer and an MLP.

    Raises:
      ValueError: the mixer is none of the benchmark's.
    """
    from jaxblt.mixers import (
        AttentionConfig,
        GatedDeltaNetConfig,
        GatedLinearAttentionConfig,
        GatedRecurrenceConfig,
        GRUConfig,
        HyenaConfig,
        LSTMConfig,
        Mamba2Config,
        MixerConfig,
        NTMConfig,
        StateEngineConfig,
    )
    from jaxblt.models import StackConfig

    heads = max(dim // 128, 1)
    engines: dict[str, Callable[[], MixerConfig]] = {}
    edges: dict[str, Any] = {"cell": "gru", "state_attention": True, "state_routes": True, "packed": False}
    for slots in STATES:
        engine = partial(StateEngineConfig, dim=dim, num_heads=heads, num_slots=slots)
        engines[f"T{slots}"], engines[f"T{slots}_edges"] = engine, partial(engine, **edges)
    known: dict[str, Callable[[], MixerConfig]] = {
        "A": partial(AttentionConfig, dim=dim, num_heads=heads, packed=False),
        "D": partial(GatedDeltaNetConfig, dim=dim, num_heads=heads),
        "G": partial(GatedLinearAttentionConfig, dim=dim, num_heads=heads),
        "H": partial(HyenaConfig, dim=dim, packed=False),
        "2": partial(Mamba2Config, dim=dim),
        "R": partial(GatedRecurrenceConfig, dim=dim),
        "P": partial(GatedRecurrenceConfig, dim=dim, cell="minlstm"),
        "U": partial(GRUConfig, dim=dim, num_heads=heads),
        "L": partial(LSTMConfig, dim=dim, num_heads=heads),
        "N": partial(NTMConfig, dim=dim),
        **engines,
    }
    if name not in known:
        raise ValueError(f"unknown mixer {name!r}, choose among {', '.join(known)}")
    return StackConfig(dim=dim, num_layers=1, pattern=(name,), mixers={name: known[name]()}, scan=False)


def parameters(name: str, dim: int) -> int:
    """Count the numbers that a block learns."""
    import jax
    import jax.numpy as jnp

    from jaxblt.models.stack import Stack
    from jaxblt.training.flops import count_params

    x = jax.ShapeDtypeStruct((1, 16, dim), jnp.float32)
    return count_params(jax.eval_shape(Stack(block(name, dim)).init, jax.random.key(0), x)["params"])[0]


def draw_block(name: str, dim: int) -> Any:
    """Draw the block's parameters in bf16, as frozen models hold them; a program widens them itself."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.models.stack import Stack

    def initial(key: Any) -> Any:
        params = Stack(block(name, dim)).init(key, jnp.zeros((1, 16, dim), jnp.float32))["params"]
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nn.meta.unbox(params))

    return jax.jit(initial)(jax.random.key(0))


def programs(name: str, params: Any, length: int, setting: Setting) -> Block:
    """Return what is compiled of a block for a row of this length.

    The cotangent is there when the output is, as in a model, where a loss lies between: no loop does both passes at
    once.
    """
    import jax
    import jax.numpy as jnp

    from jaxblt.models.stack import Stack
    from jaxblt.profiling import Case
    from jaxblt.training.flops import as_shapes, countable_device, matmul_flops
    from jaxblt.training.state import widen

    module = Stack(block(name, setting.dim), jnp.dtype(setting.dtype))

    def forward(params: Any, x: Any) -> Any:
        return module.apply({"params": widen(params)}, x)[0]  # pyright: ignore[reportIndexIssue]

    def both(params: Any, x: Any, dy: Any) -> Any:
        y, back = jax.vjp(forward, params, x)
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, back(dy.astype(y.dtype))

    x = jax.ShapeDtypeStruct((1, length, setting.dim), setting.dtype)
    shapes = (as_shapes(params), x, x)
    with jax.default_device(countable_device()):
        flops = matmul_flops(forward, *shapes[:2])
    both_ways = Case(f"{name} {PASSES[1]}", jax.jit(both), shapes)
    return Block(flops, {PASSES[0]: Case(name, jax.jit(forward), shapes[:2]), PASSES[1]: both_ways})


def compile_blocks(blocks: dict[str, Block]) -> dict[str, Block]:
    """Compile the programs side by side, those with gradients first, which take the longest."""
    from jaxblt.profiling import compiled

    order = [(name, kind) for kind in reversed(PASSES) for name in blocks]
    made = compiled([blocks[name].cases[kind] for name, kind in order])
    cases = dict(zip(order, made, strict=True))
    return {
        name: Block(one.flops, {kind: cases[name, kind] for kind in PASSES}) for name, one in blocks.items()
    }
