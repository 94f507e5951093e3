"""Weights in the dtype of decoding: a byte reads all of them, and products would cast theirs at each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.inference.decode import Decoder, DecoderState
from jaxblt.models.products import products_in


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

    reads = {"model": model}
    if decoder.needs_entropies:
        reads["entropy"] = partial(decoder.next_entropies, params, ids[:, None], state.entropy, ones[:, None])
    return {**params, **{name: _narrowed(params[name], decoder.dtype, read) for name, read in reads.items()}}


def _narrowed(params: Any, dtype: Any, read: Callable[[], Any]) -> Any:
    """The parameters, with kernels in `dtype` where `read` multiplies in it."""
    products, _ = products_in(dtype, partial(jax.eval_shape, read))

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        *above, own = (entry.key for entry in path)
        return leaf.astype(dtype) if own == "kernel" and "/".join(above) in products else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
