"""Titans: language models with a long-term memory that learns while it reads (Behrouz et al., 2501.00663)."""

from functools import partial
from typing import Literal, get_args

from jaxblt.mixers.attention.attention import AttentionConfig
from jaxblt.mixers.memory.gated_memory import MAGConfig
from jaxblt.mixers.memory.memory_context import MACConfig
from jaxblt.mixers.memory.neural_memory import NeuralMemoryConfig
from jaxblt.mixers.slots.experimental.slot_memory import SlotMemoryConfig
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.stack import StackConfig
from jaxblt.validation import whole

Form = Literal["mag", "mal", "mac", "slots"]
HEAD_DIM = 64
CHUNK, SLOT_INTERVAL = 64, 8


def titan(
    form: Form = "mag",
    *,
    dim: int = 512,
    num_layers: int = 6,
    window: int = 512,
    chunk_size: int | None = None,
    num_heads: int | None = None,
    mlp_dim: int | None = None,
) -> ByteLMConfig:
    """Return the config of a Titan over bytes.

    `build()` makes the module, and a `Recipe` takes it as its model.

    Args:
      form: "mag": in every layer a gate mixes a memory and attention over a window. "mal": layers of memory and of
        windowed attention alternate. "mac": attention within segments of a chunk also reads what the memory retrieves;
        `window` is not used. "slots": as "mal", with a bank of slots as the memory.
      dim: width.
      num_layers: number of blocks; at least two if kinds of layers alternate.
      window: number of steps that attention sees, at least `chunk_size`.
      chunk_size: number of tokens between updates of a memory; None for 64, or 8 for a bank of slots.
      num_heads: heads of memories and of attention, a divisor of `dim`. None takes heads of 64 channels, or one head if
        64 does not divide `dim`. Except for "mac" a head's width must be even, because rotary positions rotate pairs.
      mlp_dim: as in `StackConfig`.

    Raises:
      ValueError: a number is out of range, the form is unknown, the window is shorter than a chunk, or `dim` does not
        divide among the heads.
    """
    chunk_size = (SLOT_INTERVAL if form == "slots" else CHUNK) if chunk_size is None else chunk_size
    sizes = {"dim": dim, "num_layers": num_layers, "window": window, "chunk_size": chunk_size}
    for name, value in sizes.items():
        whole(name, value, least=1)
    if form not in get_args(Form):
        raise ValueError(f"form must be one of {', '.join(map(repr, get_args(Form)))}, got {form!r}")
    if form != "mac" and window < chunk_size:
        raise ValueError(
            f"titan: window must be at least chunk_size = {chunk_size}, got {window}: the memory holds nothing of a "
            "chunk before its end, so nobody would see tokens of it that the window does not reach; "
            f"raise window to {chunk_size}, or lower chunk_size to {window}"
        )
    pattern = {"mag": "J", "mal": "KW", "mac": "C", "slots": "BW"}[form]
    if num_layers < len(pattern):
        raise ValueError(
            f"titan: num_layers must be at least {len(pattern)} for form {form!r}, got {num_layers}: layers of memory "
            "and of window attention take turns, and without a window nobody sees the tokens of an open chunk; "
            "use 'mag' for one layer"
        )
    heads = (dim // HEAD_DIM if dim % HEAD_DIM == 0 else 1) if num_heads is None else num_heads
    whole("num_heads", heads, least=1)
    pairs = 1 if form == "mac" else 2  # rotary positions turn pairs of channels
    if dim % (pairs * heads):
        raise ValueError(
            f"titan: dim must be a multiple of {pairs * heads} for num_heads = {heads}, got {dim}: "
            f"set dim to {-(-dim // (pairs * heads)) * pairs * heads}, or choose another num_heads"
        )
    mixers = {
        "J": partial(MAGConfig, window=window, chunk_size=chunk_size),
        "K": partial(NeuralMemoryConfig, chunk_size=chunk_size),
        "C": partial(MACConfig, chunk_size=chunk_size),
        "B": partial(SlotMemoryConfig, interval=chunk_size),
        "W": partial(AttentionConfig, window=window),
    }
    stack = StackConfig(
        dim=dim,
        num_layers=num_layers,
        pattern=pattern,
        mixers={name: mixers[name](dim, heads) for name in pattern},
        mlp_dim=mlp_dim,
    )
    return ByteLMConfig(stack=stack)
