"""Arrays that decoding would make from parameters at each byte, made once: taps of implicit filters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxblt.inference.decode import PREPARED, Decoder, init_decoder
from jaxblt.mixers.driver.prepared import prepare, prepares
from jaxblt.parallel.sequence import seq_axis
from jaxblt.patching import ContextState


def prepare_decoding(
    decoder: Decoder, params: dict[str, Any], *, rows: int, num_bytes: int
) -> dict[str, Any]:
    """Add the arrays that `prefill` and `decode_step` would make at each call to parameters.

    Logits are the same without, and later: at 32,768 taps the implicit filters are most of the work of a byte. Prepare
    again when parameters change. The arrays are fp32 and shared by all rows: D times min(filter_len, num_bytes) numbers
    a convolution. Models that make none get their parameters back.

    Args:
      decoder: models and patcher.
      params: {"model": ..., "entropy": ...}.
      rows: of the state; any number that divides among the devices of a mesh in force.
      num_bytes: of the state, as for `init_decoder`.
    """
    if not prepares(decoder.model) and not (decoder.needs_entropies and prepares(decoder.entropy)):
        return params
    return {**params, PREPARED: _made(decoder, rows, num_bytes, params)}


@partial(jax.jit, static_argnums=(0, 1, 2))
def _made(decoder: Decoder, rows: int, num_bytes: int, params: dict[str, Any]) -> dict[str, Any]:
    """Make the prepared arrays of each model.

    The compiler drops the state and the bytes that they are made with.
    """
    state, made = init_decoder(decoder, rows, num_bytes=num_bytes), {}
    if prepares(decoder.model):
        # Make the arrays of a whole block: a step runs its latent stack under a condition, from which none can be
        # stored.
        model, axis = decoder.build(), seq_axis()
        ids = jnp.zeros((rows, model.grid * (1 if axis is None else axis.size)), jnp.int32)
        entropies = jnp.zeros(ids.shape, jnp.float32) if decoder.needs_entropies else None
        given = {"segment_ids": jnp.ones_like(ids), "entropies": entropies}
        apply = partial(model.apply, method="prefill")
        made["model"] = prepare(apply, {"params": params["model"]}, ids, state.model, **given)
    if decoder.needs_entropies and prepares(decoder.entropy):
        inner = state.entropy
        windows, inner = (2, inner.model) if isinstance(inner, ContextState) else (1, inner)
        ids = jnp.zeros((windows * rows, 1), jnp.int32)
        apply = partial(decoder.reader().apply, method="stream")
        made["entropy"] = prepare(apply, {"params": params["entropy"]}, ids, inner)
    return {name: found.get(PREPARED, {}) for name, found in made.items()}
