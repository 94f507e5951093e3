"""cuDNN's attention over documents that lie anywhere in one buffer, by JAX's primitives.

JAX's own functions take documents by row, as many for each; these put any number into any row.
Written for jax 0.11 and 0.12.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_alike
from pallas_kernels.attention.documents import Documents


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    documents: Documents,
    *,
    longest: int,
    **options: Any,
) -> tuple[Float[Array, "B T H K"], Float[Array, "N H longest"]]:
    """Return the output, which is anything outside of the documents, and the fp32 log-sum-exp of every document.

    Args:
      q, k, v: of all tokens.
      documents: N of them, a multiple of B * T / longest larger than it.
      longest: no document has more tokens; divides T.
      options: causal, window, scale.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    shapes = q.shape
    q, k, v = (x.reshape(-1, longest, *x.shape[2:]) for x in (q, k, v))
    places, unused = _places(q, k, documents)
    options = _options(**options) | {"is_training": True}
    o, lse = cudnn._dot_product_attention_fwd_p.bind(*(q, k, v, unused, *places, unused, unused), **options)
    return o.reshape(shapes), lse


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    o: Float[Array, "B T H K"],
    lse: Float[Array, "N H longest"],
    do: Float[Array, "B T H K"],
    documents: Documents,
    *,
    longest: int,
    **options: Any,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T G K"], Float[Array, "B T G K"]]:
    """Return dq, dk and dv, which are anything outside of the documents; arguments as of `attention`."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    shapes = q.shape, k.shape, v.shape
    q, k, v, o, do = (x.reshape(-1, longest, *x.shape[2:]) for x in (q, k, v, o, do))
    places, unused = _places(q, k, documents)
    found = cudnn._dot_product_attention_bwd_p.bind(
        *(q, k, v, unused, *places, unused, unused, lse, o, do), **_options(**options)
    )
    dq, dk, dv = (x.reshape(shape) for x, shape in zip(found, shapes, strict=True))
    return dq, dk, dv


def _places(q: Array, k: Array, documents: Documents) -> tuple[tuple[Array, ...], Array]:
    """Return lengths in tokens and starts in elements, of queries and of keys; and what stands for absent operands."""
    rows, longest, heads, width = q.shape
    room = documents.lengths.size // rows
    lengths = documents.lengths.reshape(rows, room)
    # One start more a row than documents: the kernel reads one more in all.
    starts = jnp.pad(documents.starts, (0, rows), constant_values=rows * longest).reshape(rows, room + 1)
    places = lengths, lengths, starts * (heads * width), starts * (k.shape[2] * width)
    (unused,) = vary_alike(jnp.zeros(0, q.dtype), q)[:1]
    return places, unused


def _options(*, causal: bool, window: int | None, scale: float) -> dict[str, Any]:
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    options = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": MaskType.PADDING_CAUSAL if causal else MaskType.PADDING,
        "layout": AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return options
