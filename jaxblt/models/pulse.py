"""PULSE models: stacks of state engines, as a language model or a classifier."""

from jaxblt.mixers.slots.state_engine import StateEngineConfig
from jaxblt.models.byte_lm import ByteLMConfig
from jaxblt.models.classifier import ByteClassifierConfig
from jaxblt.models.stack import StackConfig
from jaxblt.validation import whole

HEAD_DIM = 64
TOP_K = 16


def SimplePulse(
    vocab_size: int = 10_000,
    d_model: int = 512,
    num_states: int = 128,
    use_checkpoint: bool = False,
    sparse_routing: bool = False,
    top_k_states: int | None = None,
    *,
    num_layers: int = 6,
    num_classes: int | None = None,
) -> ByteLMConfig | ByteClassifierConfig:
    """Return the config of a stack of state engines.

    `build()` makes the module, and a `Recipe` takes it as its model. Its engines have no edges, levels or adaptive
    count; replace `stack.mixers["state_engine"]` for those.

    Args:
      vocab_size: number of ids, at least the 260 of bytes.
      d_model: width. Heads have 64 channels, or there is one head if 64 does not divide the width.
      num_states: number of slots per head.
      use_checkpoint: keep only a block's input for the backward pass, and compute the rest again.
      sparse_routing: tokens write to their likeliest slots only. This changes what slots hold but saves no time: routes
        are dense matrices, and skipping zeros would need fewer products on tensor cores only from about 4,096 slots on.
      top_k_states: number of slots that a token writes to with `sparse_routing`; None for 16, or for all slots if there
        are fewer.
      num_layers: number of blocks.
      num_classes: number of classes of a classifier, with logits [rows, classes]; None for a language model.

    Raises:
      ValueError: a number is out of range, or `top_k_states` is given without `sparse_routing`.
    """
    for name, value in (("d_model", d_model), ("num_states", num_states), ("num_layers", num_layers)):
        whole(name, value, least=1)
    for name, value in (("use_checkpoint", use_checkpoint), ("sparse_routing", sparse_routing)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    engine = StateEngineConfig(
        dim=d_model,
        num_heads=d_model // HEAD_DIM if d_model % HEAD_DIM == 0 else 1,
        num_slots=num_states,
        top_k_states=_top_k(num_states, sparse_routing, top_k_states),
    )
    stack = StackConfig(
        dim=d_model,
        num_layers=num_layers,
        pattern=("state_engine",),
        mixers={"state_engine": engine},
        remat="full" if use_checkpoint else "none",
    )
    if num_classes is None:
        return ByteLMConfig(stack=stack, vocab_size=vocab_size)
    return ByteClassifierConfig(stack=stack, vocab_size=vocab_size, num_classes=num_classes)


def _top_k(num_states: int, sparse: bool, top_k: int | None) -> int | None:
    """Return how many slots a token writes to; None for all."""
    if top_k is None:
        return min(TOP_K, num_states) if sparse else None
    whole("top_k_states", top_k, least=1, most=num_states, why=": num_states is the most")
    if not sparse:
        raise ValueError(
            f"top_k_states={top_k} needs sparse_routing=True: set it, or leave top_k_states None"
        )
    return top_k
