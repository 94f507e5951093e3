"""Rematerialisation policies by name: what a layer keeps for the backward pass and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax

from jaxblt.einsums import PRODUCT

Remat = Literal["none", "full", "dots", "offload"]
"""The name of what a layer keeps for the backward pass; `remat` says what each keeps."""

# Keep these checkpoint_names in every policy: what crosses devices is never computed twice
ALWAYS_SAVED = ("ring_out", "ring_lse")
# Name the input of each block, the one thing that "offload" keeps, in host memory
BLOCK_INPUT = "block_input"
# Keep output and log-sum-exps of cuDNN's attention under "dots": a second forward pass takes longer than reading them
CUDNN = ("dot_product_attention_fwd", "dot_product_attention_fp8_fwd")


def remat(module: type[nn.Module], policy: Remat) -> type[nn.Module]:
    """Put `module` under `jax.checkpoint` with the named policy; "none" leaves it as it is.

    - "none": keep every intermediate.
    - "full": keep only a layer's input; about one more forward pass.
    - "dots": keep the outputs of matmuls without batch axes, and what cuDNN's attention returns; elementwise work,
      convolutions and other attention are done again.
    - "offload": as "full", with the inputs of the blocks in pinned host memory (GPU and TPU).

    Raises:
      ValueError: unknown policy.
    """
    if policy == "none":
        return module
    return nn.remat(module, policy=_policy(policy))


def _policy(policy: Remat) -> Callable[..., Any]:
    saved = jax.checkpoint_policies.save_only_these_names(*ALWAYS_SAVED)
    if policy == "full":
        return saved
    if policy == "dots":
        dots = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims
        named = jax.checkpoint_policies.save_only_these_names(*ALWAYS_SAVED, PRODUCT)
        both = jax.checkpoint_policies.save_from_both_policies
        return both(both(dots, named), _is_attention)
    if policy == "offload":
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(ALWAYS_SAVED),
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    raise ValueError(f"unknown remat policy {policy!r}, expected one of none, full, dots, offload")


def _is_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether an operation is cuDNN's attention."""
    return primitive.name.startswith(CUDNN)
