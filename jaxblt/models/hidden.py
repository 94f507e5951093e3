"""Hidden states of a layer, read out of a model's own parallel pass.

Flax captures what a submodule returns where `apply` is asked to (`capture_intermediates`). Nothing is stored otherwise,
so training does not pay for it. A scanned layer is captured in every period of its pattern.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from jaxblt.models.stack import StackConfig
from jaxblt.patching.patches import Patches

CAPTURED = "intermediates"
"""Flax's collection of captured values."""

FINAL = ("head", "norm")
"""The submodule whose outputs the head reads logits off."""


@dataclass(frozen=True)
class Layer:
    """The place that hidden states come from.

    Attributes:
      path: of the submodule that returns them.
      period: which of the scanned periods; None for a submodule that is not scanned.
      of_patches: they are vectors of patches, in the slots of a row, not of bytes.
    """

    path: tuple[str, ...]
    period: int | None = None
    of_patches: bool = False


def layers_of(model: Any) -> list[Layer]:
    """Return a model's blocks in the order in which bytes pass them, each with its output.

    A BLT has those of its encoder, its latent stack (over patches), and its decoder.

    Raises:
      ValueError: the model does not name its stacks.
    """
    stacks: Mapping[str, StackConfig] | None = getattr(model, "stacks", None)
    if stacks is None:
        raise ValueError(
            f"model {type(model).__name__} does not name its stacks: to read layers, give it `stacks` as ByteLM has"
        )
    over_patches = getattr(model, "patch_stacks", ())
    return [
        _block(name, stack, i, name in over_patches)
        for name, stack in stacks.items()
        for i in range(stack.num_layers)
    ]


def find_layer(model: Any, layer: int | Literal["final"]) -> Layer:
    """Return a layer by its number, counted from the end if negative, or what the head reads.

    Raises:
      ValueError: there is no such layer.
    """
    layers = layers_of(model)
    if layer == "final":
        return Layer(FINAL)
    if isinstance(layer, bool) or not isinstance(layer, int) or not -len(layers) <= layer < len(layers):
        raise ValueError(
            f"layer must be 'final' or lie in {-len(layers)}..{len(layers) - 1}, the blocks of the model, got {layer!r}"
        )
    return layers[layer]


def hidden_states(
    model: Any, params: Any, layer: Layer, ids: Int[Array, "B T"], **options: Any
) -> tuple[Float[Array, "B S D"], Patches | None]:
    """Return a layer's outputs, S bytes or slots a row, and the patches that the model used.

    Args:
      model: a `LanguageModel` that names its stacks.
      params: of the model.
      layer: of `find_layer`.
      ids: byte ids.
      options: segment_ids, positions, entropies and patches, as the model takes them.

    Raises:
      ValueError: the model has a level, and the layer is of its groups.
    """
    config = getattr(model.config, "base", model.config)
    if layer.of_patches and getattr(config, "level", None) is not None:
        raise ValueError(
            f"layer {'/'.join(layer.path)} is of groups of patches, which lie at no patch of the row: choose one of "
            "the encoder or the decoder"
        )
    (_, patches), captured = model.apply(
        {"params": params},
        ids,
        **options,
        capture_intermediates=lambda module, method: module.path == layer.path and method == "__call__",
        mutable=[CAPTURED],
    )
    found = captured[CAPTURED]
    for name in layer.path:
        found = found[name]
    output = found["__call__"][-1]
    states = output[0] if isinstance(output, tuple) else output
    return (states if layer.period is None else states[layer.period]), patches


def _block(stack_name: str, stack: StackConfig, i: int, of_patches: bool) -> Layer:
    """Return block i of a stack; see `Stack` for the names of its submodules."""
    period, place = divmod(i, len(stack.pattern))
    block = f"block_{place}"
    if period == stack.repeats:
        return Layer((stack_name, "rest", block), None, of_patches)
    if stack.scan:
        return Layer((stack_name, "periods", block), period, of_patches)
    return Layer((stack_name, f"period_{period}", block), None, of_patches)
