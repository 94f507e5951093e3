"""Calls of every op, as shapes: those of its `shapes.py`, then few and many rows, short and long, packed, in fp32."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import attention, byte_head, patch_attention
from pallas_kernels.attention import masks
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.blocked_conv import blocked_conv
from pallas_kernels.blocked_conv import shapes as blocked_shapes
from pallas_kernels.byte_head import shapes as head_shapes
from pallas_kernels.gated_delta_rule import gated_delta_rule
from pallas_kernels.gated_delta_rule import shapes as delta_shapes
from pallas_kernels.gated_linear_attention import gated_linear_attention
from pallas_kernels.gated_linear_attention import shapes as linear_shapes
from pallas_kernels.hash_embedding import hash_embedding
from pallas_kernels.hash_embedding import shapes as hash_shapes
from pallas_kernels.linear_scan import linear_scan
from pallas_kernels.linear_scan import shapes as scan_shapes
from pallas_kernels.long_conv import long_conv
from pallas_kernels.long_conv import shapes as long_shapes
from pallas_kernels.modal_conv import modal_conv
from pallas_kernels.modal_conv import shapes as modal_shapes
from pallas_kernels.neural_memory import neural_memory
from pallas_kernels.neural_memory import shapes as memory_shapes
from pallas_kernels.norm_dropout import norm_dropout
from pallas_kernels.norm_dropout import shapes as norm_shapes
from pallas_kernels.patch_attention import shapes as patch_shapes
from pallas_kernels.routed_lora import routed_lora
from pallas_kernels.routed_lora import shapes as lora_shapes
from pallas_kernels.short_conv import shapes as short_shapes
from pallas_kernels.short_conv import short_conv
from pallas_kernels.token_product import shapes as token_shapes
from pallas_kernels.token_product import token_product

BF16, FP32, INT32, E4M3 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn


MANY_LONG_ROWS = long_shapes.LongConvShape("1024 x 1M", 1024, 1, 1 << 20, 1 << 20)
"""Rows of a channel whose spectra kernels cannot count."""


class Call(NamedTuple):
    """A call of an op, and what tells it from the others."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""An op, its arguments and its options."""


def like(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    """Return an array without values."""
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(
    shapes: tuple[Any, ...], make: Callable[[Any, Any, Any], Made], time: str = "length"
) -> Iterator[Call]:
    """Yield calls of a model's shapes, and of its first with 1 and 64 rows of 1 to 65,536 steps.

    Args:
      shapes: of `shapes.py`.
      make: the call of a shape in a dtype, with segment ids or None.
      time: the field that counts the steps of a row.
    """
    rows = ({"batch": batch, time: length} for batch in (1, 64) for length in (1, 300, 1024, 65_536))
    others = [replace(shapes[0], name=" x ".join(map(str, row.values())), **row) for row in rows]
    for dtype, packed in ((BF16, False), (BF16, True), (FP32, False), (FP32, True)):
        for shape in (*shapes, *others):
            ids = like(shape.batch, getattr(shape, time), dtype=INT32) if packed else None
            name = f"{shape.name} {jnp.dtype(dtype).name}" + " packed" * packed
            yield Call(name, *make(shape, dtype, ids))


def attend(run: Any, shape: Any, dtype: Any, ids: Any) -> Made:
    """Return attention, or partial attention or its gradients: over keys of the same tokens."""
    counts = shape.heads, shape.groups
    q, k = (like(shape.batch, shape.tokens, n, shape.head_dim, dtype=dtype) for n in counts)
    mask = masks.band(shape.causal, shape.window) & masks.documents(ids)
    if run is not attention.partial_attention_backward:
        return run, (q, k, k, mask), {}
    merged = attention.Partial(q, like(shape.batch, shape.heads, shape.tokens, dtype=FP32))
    return run, (q, k, k, merged, q, mask), {}


def convolve(op: Any, shape: Any, dtype: Any, ids: Any) -> Made:
    """Return a convolution with taps."""
    x = like(shape.batch, shape.channels, shape.length, dtype=dtype)
    causal = getattr(shape, "causal", True)
    taps = like(shape.channels, shape.taps if causal else 2 * shape.taps - 1, dtype=FP32)
    return op, (x, taps), {"segment_ids": ids} | ({} if op is short_conv else {"causal": causal})


def convolve_modes(shape: Any, dtype: Any, ids: Any) -> Made:
    x = like(shape.batch, shape.channels, shape.length, dtype=dtype)
    modes = like(shape.channels, shape.modes, dtype=FP32)
    return modal_conv, (x, modes, modes), {"segment_ids": ids}


def scan(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    x = like(shape.batch, shape.length, shape.width, dtype=dtype)
    return linear_scan, (x, x), {}


def attend_linearly(op: Any, shape: Any, dtype: Any, ids: Any) -> Made:
    """Return linear attention with its kind of gate, or the delta rule."""
    k = like(shape.batch, shape.length, shape.key_heads, shape.keys, dtype=dtype)
    v = like(shape.batch, shape.length, shape.heads, shape.values, dtype=dtype)
    gates = {"head": v.shape[:3], "key": k.shape, "value": v.shape}
    if op is gated_delta_rule:
        return op, (k, k, v, like(*gates["head"], dtype=FP32)), {"segment_ids": ids}
    name = "log_gate" if shape.gate == "head" else f"log_{shape.gate}_gate"
    return op, (k, k, v), {name: like(*gates[shape.gate], dtype=FP32), "segment_ids": ids}


def remember(shape: Any, dtype: Any, ids: Any) -> Made:
    x = like(shape.batch, shape.length, shape.heads, shape.width, dtype=dtype)
    gate, sizes = like(*x.shape[:3], dtype=FP32), ((shape.width, shape.hidden), (shape.hidden, shape.width))
    weights = (like(shape.heads, *m, dtype=FP32) for m in (sizes if shape.hidden else [(shape.width,) * 2]))
    return (
        neural_memory,
        (x, x, x, *(gate,) * 3, tuple(weights)),
        {"chunk_size": shape.chunk, "segment_ids": ids},
    )


def normalise(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    x, scale = like(shape.batch, shape.length, shape.dim, dtype=dtype), like(shape.dim, dtype=FP32)
    return norm_dropout, (x, scale, like(2, dtype=jnp.uint32)), {"rate": shape.rate}


def decode() -> Iterator[Call]:
    """Yield products of a decoded token."""
    for dtype in (BF16, FP32):
        for shape in token_shapes.SHAPES:
            x = None if shape.gated or shape.heads else like(shape.dim, dtype=dtype)
            kernels = tuple(like(shape.dim, width, dtype=dtype) for width in shape.widths)
            parts = like(shape.parts, shape.channels, dtype=FP32) if shape.parts else None
            options = {"scale": like(shape.dim, dtype=FP32) if shape.normed else None, "parts": parts}
            options["lse"] = like(shape.parts, shape.heads, dtype=FP32) if shape.heads else None
            yield Call(f"{shape.name} {jnp.dtype(dtype).name}", token_product, (x, kernels), options)


def pool(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    rows, sizes = (shape.batch, shape.blocks), (shape.capacity, shape.block_size)
    q, k = (like(*rows, n, shape.heads, shape.head_dim, dtype=dtype) for n in sizes)
    return patch_attention.pool, (q, k, k, like(*rows, shape.block_size, dtype=INT32)), {}


def look_up(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    rows, slots = (shape.batch, shape.blocks), shape.capacity + shape.look_back
    q, k = (like(*rows, n, shape.heads, shape.head_dim, dtype=dtype) for n in (shape.block_size, slots))
    marks = like(*rows, shape.block_size, dtype=INT32), like(*rows, slots, dtype=jnp.bool_)
    bias = like(shape.heads, shape.look_back, dtype=FP32)
    return patch_attention.lookup, (q, k, k, *marks, bias), {"look_back": shape.look_back}


def adapt(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    sizes = (shape.inputs, shape.outputs), (shape.inputs, shape.rank), (shape.rank, shape.outputs)
    matrices = ((like(*size, dtype=dtype),) * shape.sites for size in sizes)
    x = like(shape.batch, shape.length, shape.inputs, dtype=dtype)
    code = like(shape.batch, -(-shape.length // shape.chunk), shape.blocks, dtype=FP32)
    return routed_lora, (x, *matrices, code), {"chunk": shape.chunk, "channels_first": shape.channels_first}


def embed(shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    count = len(shape.sizes)
    rows = like(shape.batch, shape.length, count, dtype=INT32)
    return hash_embedding, (like(count * shape.table_size, shape.dim, dtype=dtype), rows), {}


def predict(op: Any, shape: Any, dtype: Any, ids: Any) -> Made:
    del ids
    arrays = like(shape.batch, shape.length, shape.dim, dtype=dtype), like(shape.dim, shape.vocab, dtype=FP32)
    targets = (like(shape.batch, shape.length, dtype=INT32),) if op is byte_head.cross_entropy else ()
    return op, (*arrays, *targets), {}


def of_attention(run: Any) -> Iterator[Call]:
    return calls(attention_shapes.SHAPES, partial(attend, run), time="tokens")


def read_cache(shape: Any, dtype: Any, ids: Any) -> Made:
    """Return a token's call over a cache as long as the row."""
    del ids
    q, k = (
        like(shape.batch, length, heads, shape.head_dim, dtype=dtype)
        for length, heads in ((1, shape.heads), (shape.tokens, shape.groups))
    )
    marks = (like(shape.batch, length, dtype=INT32) for length in (1, shape.tokens))
    return attention.prefix_attention, (q, k, k, *marks), {}


def write_token(shape: Any, dtype: Any, ids: Any) -> Made:
    """Return a token's call that writes a cache as long as the row."""
    del ids
    k = like(shape.batch, shape.tokens, shape.groups, shape.head_dim, dtype=dtype)
    heads = like(1, shape.batch, (shape.heads + 2 * shape.groups) * shape.head_dim, dtype=FP32)
    marks = (like(shape.batch, length, dtype=INT32) for length in (shape.tokens, 4))
    return attention.token_attention, (heads, k, k, *marks), {"dtype": dtype}


def attend_in_e4m3(op: Any, shape: Any, dtype: Any, ids: Any) -> Made:
    """Return causal attention of arrays in E4M3, or its gradients; keys have as many heads as queries."""
    del dtype, ids
    x, scale = like(shape.batch, shape.tokens, shape.heads, shape.head_dim, dtype=E4M3), like(dtype=FP32)
    scales = attention.Fp8Scales(*(scale,) * 4)
    if op is attention.fp8_attention:
        return op, (x, x, x, scales), {}
    lse = like(shape.batch, shape.heads, shape.tokens, dtype=FP32)
    return op, (x, x, x, x, lse, x, scales, attention.Fp8GradientScales(*(scale,) * 5)), {}


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "attention.api.TABLE": partial(of_attention, attention.attention),
    "attention.fp8.TABLE": partial(
        calls, attention_shapes.SHAPES, partial(attend_in_e4m3, attention.fp8_attention), "tokens"
    ),
    "attention.fp8.GRADIENT_TABLE": partial(
        calls, attention_shapes.SHAPES, partial(attend_in_e4m3, attention.fp8_attention_gradients), "tokens"
    ),
    "attention.partial.FORWARD": partial(of_attention, attention.partial_attention),
    "attention.partial.BACKWARD": partial(of_attention, attention.partial_attention_backward),
    "attention.prefix.TABLE": partial(calls, attention_shapes.SHAPES, read_cache, "tokens"),
    "attention.token.TABLE": partial(calls, attention_shapes.SHAPES, write_token, "tokens"),
    "blocked_conv.api.TABLE": partial(calls, blocked_shapes.SHAPES, partial(convolve, blocked_conv)),
    "byte_head.api.CROSS_ENTROPY_TABLE": partial(
        calls, head_shapes.SHAPES, partial(predict, byte_head.cross_entropy)
    ),
    "byte_head.api.ENTROPY_TABLE": partial(calls, head_shapes.SHAPES, partial(predict, byte_head.entropy)),
    "gated_delta_rule.api.TABLE": partial(
        calls, delta_shapes.SHAPES, partial(attend_linearly, gated_delta_rule)
    ),
    "gated_linear_attention.api.TABLE": partial(
        calls, linear_shapes.SHAPES, partial(attend_linearly, gated_linear_attention)
    ),
    "hash_embedding.api.TABLE": partial(calls, hash_shapes.SHAPES, embed),
    "linear_scan.api.TABLE": partial(calls, scan_shapes.SHAPES, scan),
    "long_conv.api.TABLE": partial(
        calls, (*long_shapes.SHAPES, MANY_LONG_ROWS), partial(convolve, long_conv)
    ),
    "modal_conv.api.TABLE": partial(calls, modal_shapes.SHAPES, convolve_modes),
    "neural_memory.api.TABLE": partial(calls, memory_shapes.SHAPES, remember),
    "norm_dropout.api.TABLE": partial(calls, norm_shapes.SHAPES, normalise),
    "patch_attention.api.POOL_TABLE": partial(calls, patch_shapes.SHAPES, pool, "blocks"),
    "patch_attention.api.LOOKUP_TABLE": partial(calls, patch_shapes.SHAPES, look_up, "blocks"),
    "routed_lora.api.TABLE": partial(calls, lora_shapes.SHAPES, adapt),
    "short_conv.api.TABLE": partial(calls, short_shapes.SHAPES, partial(convolve, short_conv)),
    "token_product.api.TABLE": decode,
}
"""Calls that reach a table, by its module and name."""


def model_calls(table: str) -> list[Call]:
    """Return the calls of real models that reach a table: in bf16, of one document a row."""
    return [call for call in CALLS[table]() if call.name.endswith(" bfloat16") and " x " not in call.name]
