"""Weights in the dtype of decoding: a byte reads all of them, and products would cast theirs at each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.inference.decode import Decoder, DecoderState
from jaxblt.layers import Linear


@partial(jax.jit, static_argnums=(0, 1))
def narrow_params(decoder: Decoder, rows: int, params: dict[str, Any], state: DecoderState) -> dict[str, Any]:
    """The parameters with kernels in `decoder.dtype` where a step multiplies by them in it; logits are the same.

    Args:
      decoder: models and patcher.
      rows: of the state.
      params: {"model": ..., "entropy": ...}, as they are or of `prepare_decoding`.
      state: whose step is traced.
    """
    ids = jnp.zeros((rows,), jnp.int32)
    ones, known = jnp.ones_like(ids), jnp.zeros((rows,), jnp.float32) if decoder.needs_entropies else None

    def model() -> Any:
        given = {"segment_ids": ones, "entropies": known, "method": "step"}
        return decoder.build().apply(decoder.variables(params, "model"), ids, state.model, **given)

    found = {"model": _cast(params["model"], decoder.dtype, _products(decoder.dtype, model))}
    if decoder.needs_entropies:
        entropy = partial(decoder.next_entropies, params, ids[:, None], state.entropy, ones[:, None])
        found["entropy"] = _cast(params["entropy"], decoder.dtype, _products(decoder.dtype, entropy))
    return {**params, **found}


def _products(dtype: Any, trace: Callable[[], Any]) -> set[tuple[str, ...]]:
    """Paths of the `Linear`s that a trace computes in `dtype`."""
    found = set()

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Linear) and jnp.dtype(module.dtype) == jnp.dtype(dtype):
            found.add(module.path)
        return call(*args, **options)

    with nn.intercept_methods(record):
        jax.eval_shape(trace)
    return found


def _cast(params: Any, dtype: Any, products: set[tuple[str, ...]]) -> Any:
    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        *above, own = (entry.key for entry in path)
        return leaf.astype(dtype) if own == "kernel" and tuple(above) in products else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
