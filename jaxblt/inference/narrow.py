"""Weights as decoding reads them: in its dtype, and matrices of adapters beside them. A byte reads all of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxblt.adapters.update.side_by_side import groups_in, lay_out_groups
from jaxblt.inference.decode import PREPARED, Decoder, DecoderState
from jaxblt.layers import StoredKernel
from jaxblt.models.byte_lm import TURNED, turn_table
from jaxblt.models.products import products_in
from jaxblt.parallel.islands import open_axes
from pallas_kernels.token_product import is_one_launch


@partial(jax.jit, static_argnums=(0, 1))
def narrow_params(decoder: Decoder, rows: int, params: dict[str, Any], state: DecoderState) -> dict[str, Any]:
    """Cast kernels to `decoder.dtype` where a step multiplies by them in it, and tables of bytes.

    Logits are the same. Matrices of adapters come joined (`update.side_by_side`), if those are in 16 bits: logits
    are the same within rounding then.

    Args:
      decoder: models and patcher, of `unrolled` if there are adapters.
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
    given, prepared = dict(params), dict(params.get(PREPARED, {}))
    for name, read in reads.items():
        products, (groups, _) = products_in(decoder.dtype, partial(groups_in, partial(jax.eval_shape, read)))
        joined = {"/".join(path) for group in groups for path in group.paths}
        given[name] = _narrowed(params[name], decoder.dtype, products - joined)
        if groups:
            made = flatten_dict(prepared.get(name, {})) | lay_out_groups(params[name], groups)
            prepared[name] = unflatten_dict(made)
        if rows == 1 and (head := _turned_head(given[name], decoder.dtype)):
            prepared[name] = {**prepared.get(name, {}), **head}
    return {**given, PREPARED: prepared} if prepared else given


def _turned_head(params: Any, dtype: Any) -> dict[str, Any]:
    """Return the tied head's matrix for one token, where one launch multiplies by it."""
    table = params.get("embedding", {}).get("bytes")
    if table is None or "logits" in params.get("head", {}):
        return {}
    if open_axes() or dtype != jnp.bfloat16 or not is_one_launch(dtype):
        return {}
    return {"head": {TURNED: turn_table(table)}}


def _narrowed(params: Any, dtype: Any, products: set[str]) -> Any:
    """Return the parameters, with kernels of these products and tables of bytes in `dtype`."""

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        *above, own = (entry.key for entry in path)
        # Cast the table of embeddings too: a tied head would cast it at each byte
        is_table = own == "bytes" and above[-1:] == ["embedding"]
        return leaf.astype(dtype) if is_table or (own == "kernel" and "/".join(above) in products) else leaf

    # Leave quantised kernels as they are: they are read in the dtype of the product
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if isinstance(leaf, StoredKernel) else cast(path, leaf),
        params,
        is_leaf=lambda leaf: isinstance(leaf, StoredKernel),
    )
