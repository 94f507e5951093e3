"""What is compiled: every Mosaic and Triton kernel in the programs that users make of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import Chosen, masks, mosaic_gpu_partial, presets, triton_gpu, triton_prefix
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.attention.chosen import select_triton
from pallas_kernels.attention.chosen.places import Places
from pallas_kernels.attention.triton_token import token_attention
from pallas_kernels.blocked_conv import shapes as blocked_shapes
from pallas_kernels.blocked_conv.mosaic_gpu import blocked_conv_mosaic_gpu
from pallas_kernels.gated_delta_rule.mosaic_gpu_step import gated_delta_rule_step
from pallas_kernels.gated_linear_attention import shapes as linear_shapes
from pallas_kernels.gated_linear_attention.mosaic_gpu import gated_linear_attention_mosaic_gpu
from pallas_kernels.gated_linear_attention.mosaic_gpu_step import gated_linear_attention_step
from pallas_kernels.gated_linear_attention.stretches import in_stretches
from pallas_kernels.linear_scan import shapes as scan_shapes
from pallas_kernels.linear_scan.mosaic_gpu import linear_scan_mosaic_gpu
from pallas_kernels.long_conv.mosaic_gpu import long_conv_mosaic_gpu
from pallas_kernels.modal_conv import hopper as modal_hopper
from pallas_kernels.modal_conv import shapes as modal_shapes
from pallas_kernels.modal_conv.mosaic_gpu import modal_conv_mosaic_gpu
from pallas_kernels.neural_memory import shapes as memory_shapes
from pallas_kernels.neural_memory.mosaic_gpu_or_xla import neural_memory_mosaic_gpu_or_xla
from pallas_kernels.norm_dropout import api as norm_dropout
from pallas_kernels.norm_dropout import shapes as norm_shapes
from pallas_kernels.norm_dropout import triton_gpu as norm_triton
from pallas_kernels.patch_attention import shapes as patch_shapes
from pallas_kernels.patch_attention import triton_gpu as patch_triton
from pallas_kernels.routed_lora import active_blocks
from pallas_kernels.routed_lora import shapes as lora_shapes
from pallas_kernels.routed_lora.mosaic_gpu import routed_lora_mosaic_gpu
from pallas_kernels.short_conv import shapes as short_shapes
from pallas_kernels.short_conv.mosaic_gpu import short_conv_mosaic_gpu
from pallas_kernels.short_conv.triton_gpu import short_conv_triton
from pallas_kernels.token_product import shapes as token_shapes
from pallas_kernels.token_product import triton_gpu as token_triton

AXIS = "device"
"""The mesh axis of programs on several devices."""


@dataclass(frozen=True)
class Program:
    """A function, named `<op>/<what>`, the shapes of its arguments, and on how many devices it runs."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    devices: int = 1


def _attention() -> Iterator[Program]:
    """Partial attention as in a ring, and rules, with heads of either size."""
    for shape in attention_shapes.SHAPES:
        if shape.name in ("llama3_8b_8k", "esm2_650m"):
            yield from _partials(f"attention/partial_{shape.head_dim}", shape)
            yield from _rules(f"attention/triton_{shape.head_dim}", shape)
    yield from _chosen()


def _chosen() -> Iterator[Program]:
    """Chosen blocks of both sizes, the larger ones in packed rows, and the choice of 16 of 1,024."""
    q, k, pooled = (
        jax.ShapeDtypeStruct((4, tokens, n, 128), jnp.bfloat16)
        for tokens, n in ((4096, 32), (4096, 4), (1024, 4))
    )
    arrays = {"q": q, "k": k, "v": k}
    for block in (64, 128):
        run = partial(_chosen_blocks, block=block, packed=block == 128)
        yield Program(f"attention/chosen_{block}", _forward_and_gradients(run), (q, arrays))
    yield from _transformed("attention/chosen", partial(_chosen_blocks, block=64, packed=True), arrays, q)
    asks, blocks = (Places(*2 * (jax.ShapeDtypeStruct(x.shape[:2], jnp.int32),)) for x in (q, pooled))
    yield Program(
        "attention/choose", partial(select_triton.choose_blocks, count=16), (q, pooled, asks, blocks)
    )


def _chosen_blocks(q: Any, k: Any, v: Any, *, block: int, packed: bool) -> Any:
    ids = 1 + jax.lax.broadcasted_iota(jnp.int32, q.shape[:2], 1) // 300
    lists = jax.lax.broadcasted_iota(jnp.int32, (q.shape[0], k.shape[2], q.shape[1], 16), 3)
    mask = masks.CAUSAL & Chosen(lists, block) & masks.documents(ids if packed else None)
    return triton_gpu.attention(q, k, v, mask)


def _rules(op: str, shape: attention_shapes.AttentionShape) -> Iterator[Program]:
    """Tiles of 128, and of 64 in packed rows."""
    q, k = (
        jax.ShapeDtypeStruct((4, 1024, n, shape.head_dim), jnp.bfloat16) for n in (shape.heads, shape.groups)
    )
    arrays = {"q": q, "k": k, "v": k}
    for block in (128, 64):
        run = partial(_block_sparse, block=block, packed=block == 64)
        yield Program(f"{op}_{block}", _forward_and_gradients(run), (q, arrays))
    if shape.groups < shape.heads:
        yield from _transformed(op, partial(_block_sparse, block=128, packed=True), arrays, q)


def _block_sparse(q: Any, k: Any, v: Any, *, block: int, packed: bool) -> Any:
    ids = 1 + jax.lax.broadcasted_iota(jnp.int32, q.shape[:2], 1) // 300
    mask = masks.CAUSAL & presets.bigbird(block=block) & masks.documents(ids if packed else None)
    return triton_gpu.attention(q, k, v, mask)


def _partials(op: str, shape: attention_shapes.AttentionShape) -> Iterator[Program]:
    """The first chunk of keys, one merged into others, whole and in runs; and on four devices."""
    batch, tokens, heads, groups, width = shape.batch, shape.tokens, shape.heads, shape.groups, shape.head_dim
    q, k = (jax.ShapeDtypeStruct((batch, tokens, n, width), jnp.bfloat16) for n in (heads, groups))
    lse = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    first = {"q": q, "k": k, "v": k}
    merged = first | {"accumulator": (jax.ShapeDtypeStruct(q.shape, jnp.float32), lse)}
    lengths = merged | {"lengths": jax.ShapeDtypeStruct((batch,), jnp.int32)}
    half = jax.ShapeDtypeStruct((batch // 2, tokens, groups, width), k.dtype)
    yield Program(f"{op}_first", _partial, (first,))
    yield Program(f"{op}_causal", partial(_partial, causal=True), (first,))
    yield Program(f"{op}_accumulate", _partial, (merged,))
    yield Program(f"{op}_lengths", partial(_partial, causal=True), (lengths,))
    runs = lengths | {"k": half, "v": half}
    yield Program(f"{op}_runs", _partial, (runs,))
    yield Program(f"{op}_runs_cast", partial(_partial, cast_output=True), (runs,))
    spread = (P(None, AXIS), P(None, None, AXIS))
    specs = {name: P(None, AXIS) for name in first} | {"accumulator": spread}
    split = jax.shard_map(_partial, in_specs=(specs,), out_specs=spread)
    yield Program(f"{op}_shard_map", split, (merged,), devices=4)
    split = jax.shard_map(_partial, in_specs=(specs | {"lengths": P()},), out_specs=spread)
    yield Program(f"{op}_runs_shard_map", split, (runs,), devices=4)


def _partial(arrays: Any, causal: bool = False, cast_output: bool = False) -> Any:
    mask = masks.band(causal)
    mask &= masks.key_lengths(arrays["lengths"]) if "lengths" in arrays else masks.FULL
    q, k, v = (arrays[name] for name in "qkv")
    options = {"accumulator": arrays.get("accumulator"), "cast_output": cast_output}
    return mosaic_gpu_partial.attention_with_lse(q, k, v, mask, **options)


def _prefixes() -> Iterator[Program]:
    """A token over a long cache of bf16 and of fp32, drafted tokens whose heads share keys; vmap, and four devices."""
    run = triton_prefix.prefix_attention
    for name, queries, heads, groups, width, dtype in (
        ("token", 1, 16, 16, 64, jnp.bfloat16),
        ("token_fp32", 1, 16, 16, 64, jnp.float32),
        ("drafts", 16, 32, 8, 128, jnp.bfloat16),
    ):
        kv = jax.ShapeDtypeStruct((64, 131_072, groups, width), dtype)
        arrays = {"q": jax.ShapeDtypeStruct((64, queries, heads, width), jnp.bfloat16), "k": kv, "v": kv}
        arrays |= {"counts": jax.ShapeDtypeStruct((64, queries), jnp.int32)}
        arrays |= {"times": jax.ShapeDtypeStruct(kv.shape[:2], jnp.int32)}
        yield Program(f"attention/prefix_{name}", lambda arrays: run(**arrays), (arrays,))
    stacked = {name: jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for name, a in arrays.items()}
    yield Program("attention/prefix_vmap", jax.vmap(lambda arrays: run(**arrays)), (stacked,))
    specs = dict.fromkeys(arrays, P(AXIS))
    split = jax.shard_map(lambda arrays: run(**arrays), in_specs=(specs,), out_specs=P(AXIS))
    yield Program("attention/prefix_shard_map", split, (arrays,), devices=4)


def _written_tokens() -> Iterator[Program]:
    """The ring of a local layer, a latent layer, and rows whose heads share keys of fp32."""
    like = jax.ShapeDtypeStruct
    for name, rows, heads, groups, width, slots, dtype, window in (
        ("ring", 1, 8, 8, 128, 512, jnp.bfloat16, 512),
        ("latent", 1, 16, 16, 128, 2048, jnp.bfloat16, None),
        ("shared", 64, 32, 8, 64, 8192, jnp.float32, None),
    ):
        kv = like((rows, slots, groups, width), dtype)
        heads_of, turns = (
            like((2, rows, (heads + 2 * groups) * width), jnp.float32),
            like((width // 2,), jnp.uint32),
        )
        arrays = heads_of, kv, kv, like((rows, slots), jnp.int32), like((rows, 4), jnp.int32), turns
        run = partial(token_attention, dtype=jnp.bfloat16, window=window, scale=width**-0.5)
        yield Program(f"attention/token_{name}", run, arrays)


def _blocked_conv() -> Iterator[Program]:
    shape = next(shape for shape in blocked_shapes.SHAPES if shape.name == "d768_8k")
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    plain = {"x": x, "filter": jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)}
    gated = plain | {"pre_gate": x, "post_gate": x}
    for name, arrays in (("gated", gated), ("plain", plain)):
        yield Program(f"blocked_conv/{name}", lambda arrays: blocked_conv_mosaic_gpu(**arrays), (arrays,))
    yield from _transformed("blocked_conv", blocked_conv_mosaic_gpu, gated)
    yield Program("blocked_conv/packed", lambda arrays: _packed_blocked_conv(**arrays), (gated,))
    yield Program("blocked_conv/packed_plain", _gradients(_packed_blocked_conv), (x, plain))
    yield from _transformed("blocked_conv/packed", _packed_blocked_conv, gated)
    odd = jax.ShapeDtypeStruct((*x.shape[:2], shape.length - 1), x.dtype)
    arrays = plain | {"x": odd, "pre_gate": odd, "post_gate": odd}
    yield from _transformed("blocked_conv/any_length", blocked_conv_mosaic_gpu, arrays)


def _packed_blocked_conv(x: Any, **arrays: Any) -> Any:
    return blocked_conv_mosaic_gpu(x, segment_ids=_thousands(x), **arrays)


def _gated_linear_attention() -> Iterator[Program]:
    """Gates by head, key channel and value channel with heads of 128, 64 slots that are written and read, wide keys."""
    op, run = "gated_linear_attention", gated_linear_attention_mosaic_gpu
    shape = next(shape for shape in linear_shapes.SHAPES if shape.name == "h32_d128_gla_8k")
    channels = (shape.batch, shape.length, shape.heads, shape.keys)
    x, gate = (jax.ShapeDtypeStruct(channels, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    narrow = jax.ShapeDtypeStruct((*channels[:3], 64), jnp.bfloat16)
    streams = {"q": x, "k": x, "v": x}
    slots = {"q": narrow, "k": narrow, "log_key_gate": jax.ShapeDtypeStruct(narrow.shape, jnp.float32)}
    calls = {
        "heads": streams | {"log_gate": jax.ShapeDtypeStruct(channels[:3], jnp.float32)},
        "values": streams | {"log_value_gate": gate},
        "values_64": streams | {"v": narrow, "log_value_gate": slots["log_key_gate"]},
        "keys_64": streams | slots,
        "keys_values_64": streams | {"v": narrow, "log_key_gate": gate},
    }
    for name, arrays in calls.items():
        yield Program(f"{op}/{name}", _forward_and_gradients(run), (arrays["v"], arrays))
    yield from _transformed(op, run, streams | {"log_key_gate": gate})
    shape = next(shape for shape in linear_shapes.SHAPES if shape.name == "gsa_1b_write_8k")
    rows = (shape.batch, shape.length, shape.heads)
    wide, values = (
        jax.ShapeDtypeStruct((*rows, width), jnp.bfloat16) for width in (shape.keys, shape.values)
    )
    gate = jax.ShapeDtypeStruct(values.shape, jnp.float32)
    arrays = {"q": wide, "k": wide, "v": values, "log_value_gate": gate}
    yield Program(f"{op}/values_wide", _forward_and_gradients(run), (values, arrays))
    specs = dict.fromkeys(arrays, P(AXIS))
    split = jax.shard_map(_gradients(run), in_specs=(P(AXIS), specs), out_specs=specs)
    yield Program(f"{op}/values_wide_shard_map", split, (values, arrays), devices=4)
    row = {name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for name, x in calls["values_64"].items()}
    cut = partial(in_stretches, run, count=4)
    yield Program(f"{op}/stretches", _forward_and_gradients(cut), (row["v"], row))


def _linear_steps() -> Iterator[Program]:
    """Decoding with each kind of gate and by the delta rule; the latter under vmap and on four devices too."""
    shape = next(shape for shape in linear_shapes.SHAPES if shape.name == "decode_64")
    x = jax.ShapeDtypeStruct((shape.batch, 1, shape.heads, shape.keys), jnp.bfloat16)
    gate, channels = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (x.shape[:3], x.shape))
    state = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.keys, shape.values), jnp.float32)
    streams = {"q": x, "k": x, "v": x, "initial_state": state}
    run = partial(gated_linear_attention_step, output_final_state=True)
    for name, kind in (("log_gate", gate), ("log_key_gate", channels), ("log_value_gate", channels)):
        arrays = streams | {name: kind}
        yield Program(f"gated_linear_attention/step_{name}", lambda arrays: run(**arrays), (arrays,))
    delta = partial(gated_delta_rule_step, output_final_state=True)
    arrays = streams | {"beta": gate, "log_gate": gate}
    yield Program("gated_delta_rule/step", lambda arrays: delta(**arrays), (arrays,))
    stacked = {name: jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for name, a in arrays.items()}
    yield Program("gated_delta_rule/step_vmap", jax.vmap(lambda arrays: delta(**arrays)), (stacked,))
    specs = dict.fromkeys(arrays, P(AXIS))
    split = jax.shard_map(lambda arrays: delta(**arrays), in_specs=(specs,), out_specs=P(AXIS))
    yield Program("gated_delta_rule/step_shard_map", split, (arrays,), devices=4)


def _linear_scan() -> Iterator[Program]:
    """Whole and in pieces, in both dtypes; narrow rows that share factors, against time, a last tile not full."""
    for shape in scan_shapes.SHAPES:
        if shape.name in ("recurrentgemma_2b_8k", "recurrentgemma_2b_8k_bf16", "d256_1m"):
            b = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.width), shape.dtype)
            out = jax.ShapeDtypeStruct(b.shape, jnp.float32)
            arrays = {"a": b, "b": b, "initial": jax.ShapeDtypeStruct(b.shape[::2], jnp.float32)}
            yield Program(f"linear_scan/{shape.name}", _gradients(linear_scan_mosaic_gpu), (out, arrays))
    narrow = jax.ShapeDtypeStruct((8, 768, 500, 16), jnp.float32)
    arrays = {"a": jax.ShapeDtypeStruct((1, *narrow.shape[1:]), jnp.float32), "b": narrow}
    backward = _gradients(partial(linear_scan_mosaic_gpu, reverse=True))
    yield Program("linear_scan/narrow_reverse", backward, (narrow, arrays))
    b = jax.ShapeDtypeStruct((4, 8192, 2560), jnp.bfloat16)
    yield from _transformed("linear_scan", linear_scan_mosaic_gpu, {"a": b, "b": b})


def _long_conv() -> Iterator[Program]:
    """Four, two and one row in a tile, then two to eight tiles, once an odd length; without gates, packed."""
    run = long_conv_mosaic_gpu
    for length in (1024, 2048, 4096, 8192, 12_288, 16_383, 24_576, 32_768):
        x = jax.ShapeDtypeStruct((64, 768, length), jnp.bfloat16)
        plain = {"x": x, "filter": jax.ShapeDtypeStruct((768, length), jnp.float32)}
        gated = plain | {"pre_gate": x, "post_gate": x}
        yield Program(f"long_conv/{length}", lambda arrays: run(**arrays), (gated,))
        yield Program(f"long_conv/{length}_gradients", _gradients(run), (x, gated))
        if length == 8192:
            yield Program("long_conv/plain", lambda arrays: run(**arrays), (plain,))
            yield Program("long_conv/plain_gradients", _gradients(run), (x, plain))
            yield from _transformed("long_conv", run, gated)
            yield Program("long_conv/packed", lambda arrays: _packed_long_conv(**arrays), (gated,))
            yield from _transformed("long_conv/packed", _packed_long_conv, gated)
        if length == 32_768:
            yield Program("long_conv/packed_32768_gradients", _gradients(_packed_long_conv), (x, gated))
    yield from _long_conv_by_classes()
    yield from _long_conv_of_odd_lengths()


def _long_conv_by_classes() -> Iterator[Program]:
    """Rows that do not fit on chip: one, and several a channel; then all lengths with fp16 between stages."""
    run = long_conv_mosaic_gpu
    for batch, length in ((1, 1_000_000), (8, 65_536)):
        x = jax.ShapeDtypeStruct((batch, 768, length), jnp.bfloat16)
        gated = {
            "x": x,
            "pre_gate": x,
            "post_gate": x,
            "filter": jax.ShapeDtypeStruct((768, length), jnp.float32),
        }
        yield Program(f"long_conv/{length}", lambda arrays: run(**arrays), (gated,))
        yield Program(f"long_conv/{length}_gradients", _gradients(run), (x, gated))
    yield from _transformed("long_conv/classes", run, gated)
    half = partial(run, dtype="float16")
    for batch, length in ((64, 8192), (64, 16_384), (64, 32_768), (8, 65_536)):
        x = jax.ShapeDtypeStruct((batch, 768, length), jnp.bfloat16)
        arrays = {"x": x, "filter": jax.ShapeDtypeStruct((768, length), jnp.float32)}
        arrays |= {"pre_gate": x, "post_gate": x}
        yield Program(f"long_conv/half_{length}", _forward_and_gradients(half), (x, arrays))
        if length == 16_384:
            yield from _transformed("long_conv/half", half, arrays)


def _long_conv_of_odd_lengths() -> Iterator[Program]:
    """Four rows in a tile, one, and as many tiles as fit on chip: all steps of a ring but one."""
    run = long_conv_mosaic_gpu
    for length in (1023, 4095, 8191, 16_383):
        x = jax.ShapeDtypeStruct((64, 768, length), jnp.bfloat16)
        arrays = {"x": x, "filter": jax.ShapeDtypeStruct((768, length), jnp.float32)}
        arrays |= {"pre_gate": x, "post_gate": x}
        if length == 8191:
            half = partial(run, dtype="float16")
            yield Program(f"long_conv/odd_half_{length}", _forward_and_gradients(half), (x, arrays))
            yield from _transformed("long_conv/odd", run, arrays)
        elif length == 16_383:
            yield Program(f"long_conv/odd_{length}", lambda arrays: run(**arrays), (arrays,))
        else:
            yield Program(f"long_conv/odd_{length}", _forward_and_gradients(run), (x, arrays))


def _packed_long_conv(x: Any, **arrays: Any) -> Any:
    return long_conv_mosaic_gpu(x, segment_ids=_thousands(x), **arrays)


def _modal_conv() -> Iterator[Program]:
    shape = next(shape for shape in modal_shapes.SHAPES if shape.name == "d768_8k")
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    modes = jax.ShapeDtypeStruct((shape.channels, shape.modes), jnp.float32)
    plain = {"x": x, "log_poles": modes, "residues": modes}
    gated = plain | {"pre_gate": x, "post_gate": x}
    for name, arrays in (("gated", gated), ("plain", plain)):
        yield Program(f"modal_conv/{name}", lambda arrays: modal_conv_mosaic_gpu(**arrays), (arrays,))
    short = jax.ShapeDtypeStruct((shape.batch, shape.channels, modal_hopper.SHORTEST), jnp.bfloat16)
    arrays = plain | {"x": short, "pre_gate": short, "post_gate": short}
    state = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.modes), jnp.float32)
    alone = arrays | {"initial_state": state}
    yield Program("modal_conv/short", _gradients(modal_conv_mosaic_gpu), (short, alone))
    yield Program("modal_conv/shared_4", _gradients(modal_conv_mosaic_gpu), (short, arrays))
    half = jax.ShapeDtypeStruct((*x.shape[:2], 2 * modal_hopper.SHORTEST), jnp.bfloat16)
    arrays = plain | {"x": half, "pre_gate": half, "post_gate": half}
    yield from _transformed("modal_conv/shared_2", modal_conv_mosaic_gpu, arrays)
    odd = jax.ShapeDtypeStruct((*x.shape[:2], shape.length - 1), x.dtype)
    arrays = plain | {"x": odd, "pre_gate": odd, "post_gate": odd}
    yield from _transformed("modal_conv/any_length", modal_conv_mosaic_gpu, arrays)
    yield from _transformed("modal_conv/packed", _packed_modal_conv, gated)
    yield from _transformed("modal_conv", modal_conv_mosaic_gpu, gated | {"initial_state": state})


def _packed_modal_conv(x: Any, **arrays: Any) -> Any:
    return modal_conv_mosaic_gpu(x, segment_ids=_thousands(x), **arrays)


def _neural_memory() -> Iterator[Program]:
    """Chunks that are all read at once, and in groups; heads of 128. Kernels make values, XLA gradients."""
    for shape in memory_shapes.SHAPES:
        run: Callable[..., Any] = partial(_memory, shape.chunk)
        arrays = _memory_arrays(shape)
        if shape.name == "d1024_16k_c2048":
            yield Program("neural_memory/whole", lambda arrays, run=run: run(**arrays), (arrays,))
            yield from _transformed("neural_memory", run, arrays, values=True)
            narrow = _memory_arrays(replace(shape, width=128, hidden=512))
            yield Program("neural_memory/narrow", lambda arrays, run=run: run(**arrays), (narrow,))
        if shape.name == "d1024_16k_c512":
            yield Program("neural_memory/groups", _forward_and_gradients(run), (arrays["v"], arrays))


def _memory_arrays(shape: memory_shapes.NeuralMemoryShape) -> dict[str, Any]:
    """Arguments by name; theta, eta and alpha are one array."""
    x = jax.ShapeDtypeStruct((shape.batch, shape.length, shape.heads, shape.width), jnp.bfloat16)
    gates = jax.ShapeDtypeStruct((*x.shape[:3], 3), jnp.float32)
    first, second = (
        jax.ShapeDtypeStruct((shape.heads, *size), jnp.float32)
        for size in ((shape.width, shape.hidden), (shape.hidden, shape.width))
    )
    return {"q": x, "k": x, "v": x, "gates": gates, "first": first, "second": second}


def _memory(chunk: int, q: Any, k: Any, v: Any, gates: Any, first: Any, second: Any) -> Any:
    theta, eta, alpha = (gates[..., i] for i in range(3))
    arrays = (q, k, v, theta, eta, alpha, (first, second))
    return neural_memory_mosaic_gpu_or_xla(*arrays, chunk_size=chunk)


def _norm_dropout() -> Iterator[Program]:
    """A width that is no power of two; the widest, in fp32; and rows whose places are told, as on a mesh."""
    x, narrow = (
        jax.ShapeDtypeStruct((shape.batch, shape.length, shape.dim), jnp.bfloat16)
        for shape in (norm_shapes.SHAPES[0], norm_shapes.SHAPES[-1])
    )
    wide = jax.ShapeDtypeStruct((*x.shape[:2], norm_dropout.WIDEST), jnp.float32)
    for name, rows, rate in (("alone", narrow, 0.1), ("widest", wide, 0.1), ("rate_0", wide, 0.0)):
        run = partial(_dropped, rate=rate, placed=False)
        yield Program(f"norm_dropout/{name}", _forward_and_gradients(run), (rows, _scaled(rows)))
    rows = _scaled(jax.ShapeDtypeStruct((4, *x.shape[1:]), x.dtype))
    yield from _transformed("norm_dropout", partial(_dropped, rate=0.1), rows, values=True)


def _token_products() -> Iterator[Program]:
    """Each shape, and one whose widths are no multiples of a tile."""
    odd = replace(token_shapes.SHAPES[0], name="odd", dim=1000, widths=(1000, 200))
    for shape in (*token_shapes.SHAPES, odd):
        yield Program(f"token_product/{shape.name}", _tokens, (_token_arrays(shape),))


def _token_arrays(shape: token_shapes.TokenShape) -> dict[str, Any]:
    of = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    arrays: dict[str, Any] = {"x": None if shape.gated or shape.heads else of(shape.dim)}
    arrays["kernels"] = tuple(of(shape.dim, width) for width in shape.widths)
    if shape.parts:
        arrays["parts"] = of(shape.parts, shape.channels, dtype=jnp.float32)
    arrays["squares"] = of(shape.parts, dtype=jnp.float32) if shape.gated else None
    arrays["lse"] = of(shape.parts, shape.heads, dtype=jnp.float32) if shape.heads else None
    return arrays | ({"scale": of(shape.dim, dtype=jnp.float32)} if shape.normed else {})


def _tokens(arrays: dict[str, Any]) -> Any:
    return token_triton.token_product(**arrays, leaves_norm={"parts", "scale"} <= arrays.keys())


def _scaled(x: Any) -> dict[str, Any]:
    return {"x": x, "scale": jax.ShapeDtypeStruct(x.shape[-1:], jnp.float32)}


def _dropped(x: Any, scale: Any, *, rate: float, placed: bool = True) -> Any:
    seed = jnp.arange(2, dtype=jnp.uint32)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape[:2], 1) if placed else None
    return norm_triton.norm_dropout(x, scale, seed, places, rate=rate, epsilon=1e-6)


def _routed_lora() -> Iterator[Program]:
    """Three sites whose ranks share a step, have one each, or skip most of theirs; one site; and channels first."""
    named = {shape.name: shape for shape in lora_shapes.SHAPES}
    rows, hyena = named["llama_7b_rows"], named["hyena_d1024_64k"]
    for shape in (named["llama_7b_qkv"], named["llama_7b_qkv_r64"], rows):
        yield _both_ways(f"routed_lora/{shape.name}", shape)
    yield from _transformed(
        "routed_lora", lambda **arrays: _routed(**arrays)[0], _lora(named["llama_7b_out"])
    )
    yield _both_ways("routed_lora/channels_first_rows", replace(rows, channels_first=True))
    yield _both_ways("routed_lora/channels_first", hyena)
    run = partial(_routed, channels_first=True)
    yield from _transformed("routed_lora/channels_first", lambda **arrays: run(**arrays)[0], _lora(hyena))


def _both_ways(name: str, shape: lora_shapes.RoutedLoraShape) -> Program:
    order, sizes = shape.channels_first, (shape.length, shape.outputs)
    y = jax.ShapeDtypeStruct((shape.batch, *(sizes[::-1] if order else sizes)), jnp.bfloat16)
    run = partial(_routed, skips=shape.active is not None, channels_first=order)
    return Program(name, _forward_and_gradients(run), ((y,) * shape.sites, _lora(shape)))


def _lora(shape: lora_shapes.RoutedLoraShape) -> dict[str, Any]:
    """Arguments by name: the matrices of a group as a tuple, of one site as an array."""
    x = (shape.batch, shape.length, shape.inputs)
    sizes = {
        "w": (shape.inputs, shape.outputs),
        "v": (shape.inputs, shape.rank),
        "u": (shape.rank, shape.outputs),
    }
    matrices = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()}
    if shape.sites > 1:
        matrices = {name: (matrix,) * shape.sites for name, matrix in matrices.items()}
    code = jax.ShapeDtypeStruct((shape.batch, shape.length // shape.chunk, shape.blocks), jnp.float32)
    return {"x": jax.ShapeDtypeStruct(x, jnp.bfloat16), **matrices, "code": code}


def _routed(
    x: Any, w: Any, v: Any, u: Any, code: Any, *, skips: bool = False, channels_first: bool = False
) -> Any:
    matrices = (a if isinstance(a, tuple) else (a,) for a in (w, v, u))
    chunk = x.shape[1] // code.shape[1]
    active = active_blocks(code, x.shape[1], chunk=chunk) if skips else None
    options: dict[str, Any] = {"chunk": chunk, "scale": 1.0, "active": active}
    return routed_lora_mosaic_gpu(x, *matrices, code, **options, channels_first=channels_first)


def _short_conv() -> Iterator[Program]:
    shape = next(shape for shape in short_shapes.SHAPES if shape.name == "hyena_d768_8k")
    x = jax.ShapeDtypeStruct((shape.batch, shape.channels, shape.length), jnp.bfloat16)
    plain = {"x": x, "taps": jax.ShapeDtypeStruct((shape.channels, shape.taps), jnp.float32)}
    # As many taps as any shape has, with gates: the most registers.
    most = max(shape.taps for shape in short_shapes.SHAPES)
    taps = jax.ShapeDtypeStruct((shape.channels, most), jnp.float32)
    gated = plain | {"taps": taps, "pre_gate": x, "post_gate": x}
    for name, arrays in (("gated", gated), ("plain", plain)):
        yield Program(f"short_conv/{name}", lambda arrays: short_conv_mosaic_gpu(**arrays), (arrays,))
    yield from _transformed("short_conv", short_conv_mosaic_gpu, gated)
    yield from _transformed("short_conv/triton", short_conv_triton, gated, x)
    yield from _transformed("short_conv/triton_plain", short_conv_triton, plain, x)
    odd = jax.ShapeDtypeStruct((*x.shape[:2], shape.length - 1), x.dtype)
    history = jax.ShapeDtypeStruct((*x.shape[:2], most - 1), x.dtype)
    packed = gated | {"x": odd, "pre_gate": odd, "post_gate": odd, "history": history}
    yield from _transformed("short_conv/triton_packed", _packed_short_conv, packed, odd)
    yield from _transformed("short_conv/triton_packed_plain", _packed_short_conv, plain, x)


def _packed_short_conv(x: Any, **arrays: Any) -> Any:
    return short_conv_triton(x, segment_ids=_thousands(x), **arrays)


def _thousands(x: Any) -> Any:
    """Documents of 1,000 steps."""
    return 1 + jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], x.shape[2]), 1) // 1000


def _patch_attention() -> Iterator[Program]:
    """Both directions, on patches of five bytes; `lookup` at the fewest and at the most distances of any shape."""
    named = {shape.name: shape for shape in patch_shapes.SHAPES}
    for shape in (named["blt_1b_8k"], named["blt_8b_64k"]):
        bytes_, patches, seen = (
            jax.ShapeDtypeStruct((4, 2, n, shape.heads, shape.head_dim), jnp.bfloat16)
            for n in (shape.block_size, shape.capacity, shape.capacity + shape.look_back)
        )
        bias = jax.ShapeDtypeStruct((shape.heads, shape.look_back), jnp.float32)
        arrays = {"q": bytes_, "k": seen, "v": seen, "bias": bias}
        op = "patch_attention/triton"
        yield from _transformed(f"{op}_lookup_{shape.look_back}", _lookup, arrays)
        if shape.look_back == 2:
            pooled = {"q": patches, "k": bytes_, "v": bytes_}
            yield from _transformed(f"{op}_pool", _pool, pooled)


def _pool(q: Any, k: Any, v: Any) -> Any:
    return patch_triton.pool(q, k, v, jnp.minimum(_fifths(k), q.shape[2]))


def _lookup(q: Any, k: Any, v: Any, bias: Any) -> Any:
    latest = jnp.minimum(_fifths(q), k.shape[2] - 1)
    valid = jnp.ones(k.shape[:3], bool)
    return patch_triton.lookup(q, k, v, latest, valid, bias, look_back=bias.shape[1])


def _fifths(x: Any) -> Any:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape[:3], 2) // 5


def _transformed(
    op: str, run: Callable[..., Any], arrays: dict[str, Any], out: Any = None, *, values: bool = False
) -> Iterator[Program]:
    """Under remat with every gradient, under vmap, and on four devices, each with its own rows.

    Triton is not installed where these programs are only listed: there `out`, the output's shape, is to be given.
    With `values` those are made too, by a call without a derivative: kernels may make these alone.
    """
    if out is None:
        out = jax.eval_shape(lambda arrays: run(**arrays), arrays)
    passes = _forward_and_gradients if values else _gradients
    yield Program(f"{op}/remat", passes(jax.checkpoint(run)), (out, arrays))
    stacked = {name: jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for name, a in arrays.items()}
    yield Program(f"{op}/vmap", jax.vmap(lambda arrays: run(**arrays)), (stacked,))
    specs = {name: P(AXIS) if a.ndim == out.ndim else P() for name, a in arrays.items()}
    found = (P(AXIS), specs) if values else specs
    split = jax.shard_map(passes(run), in_specs=(P(AXIS), specs), out_specs=found)
    yield Program(f"{op}/shard_map", split, (out, arrays), devices=4)


def _forward_and_gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda cotangent, arrays: (run(**arrays), _gradients(run)(cotangent, arrays))


def _gradients(run: Callable[..., Any]) -> Callable[..., Any]:
    def backward(cotangent: Any, arrays: Any) -> Any:
        _, vjp = jax.vjp(lambda arrays: run(**arrays), arrays)
        return vjp(cotangent)[0]

    return backward


PROGRAMS: tuple[Program, ...] = (
    *_attention(),
    *_prefixes(),
    *_written_tokens(),
    *_blocked_conv(),
    *_gated_linear_attention(),
    *_linear_steps(),
    *_linear_scan(),
    *_long_conv(),
    *_modal_conv(),
    *_neural_memory(),
    *_norm_dropout(),
    *_token_products(),
    *_patch_attention(),
    *_routed_lora(),
    *_short_conv(),
)
