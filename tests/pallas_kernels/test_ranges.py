"""Values out of an operation's ranges are named on the host and, by checkify, inside jit."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jaxblt
from jaxblt.array_checks import check_ids
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig, HyenaConfig, NeuralMemoryConfig
from jaxblt.models.stack import Stack, StackConfig
from pallas_kernels._dispatch import explain_call
from pallas_kernels._ranges import SMALL, Range, check_documents, check_values
from pallas_kernels.attention import api as attention
from pallas_kernels.attention import masks
from pallas_kernels.blocked_conv import api as blocked_conv
from pallas_kernels.byte_head import api as byte_head
from pallas_kernels.gated_delta_rule import api as gated_delta_rule
from pallas_kernels.gated_linear_attention import api as gated_linear_attention
from pallas_kernels.hash_embedding import api as hash_embedding
from pallas_kernels.linear_scan import api as linear_scan
from pallas_kernels.long_conv import api as long_conv
from pallas_kernels.modal_conv import api as modal_conv
from pallas_kernels.neural_memory import api as neural_memory
from pallas_kernels.patch_attention import api as patch_attention
from pallas_kernels.routed_lora import api as routed_lora
from pallas_kernels.short_conv import api as short_conv
from tests.parameters import drawn

NAN, INF = float("nan"), float("inf")
IDS = np.array([[1, 1, 1, -1, 0, 2, 2, 0]], np.int32)
AGAIN = np.array([[1, 1, 2, 2, 0, 1, 1, 0]], np.int32)
SPLIT = np.array([[1, 1, 0, 1, 1, 2, 2, 0]], np.int32)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


class Call(NamedTuple):
    """A call of an operation with good arrays, the ranges of some, and which of them are per token."""

    op: Callable[..., Any]
    arrays: Mapping[str, np.ndarray]
    ranges: Mapping[str, Range] = {}
    options: Mapping[str, Any] = {}


HEADS = {name: ones(1, 8, 1, 2) for name in "qkv"}
STREAM = {"x": ones(1, 2, 8), "segment_ids": IDS}
SHARES = {name: 0.5 * ones(1, 8, 1) for name in ("theta", "eta", "alpha")}
BLOCKS = {"q": ones(1, 1, 3, 1, 2), "k": ones(1, 1, 4, 1, 2), "v": ones(1, 1, 4, 1, 2)}
LATEST = {"latest": np.ones((1, 1, 3), np.int32), "valid": np.ones((1, 1, 4), bool), "bias": ones(1, 1)}
CALLS = {
    "gated_delta_rule": Call(
        gated_delta_rule.gated_delta_rule,
        HEADS | {"beta": ones(1, 8, 1), "log_gate": -ones(1, 8, 1), "segment_ids": IDS},
        gated_delta_rule.RANGES,
    ),
    "gated_linear_attention": Call(
        gated_linear_attention.gated_linear_attention,
        HEADS | {"log_gate": -ones(1, 8, 1), "segment_ids": IDS},
        {"log_gate": gated_linear_attention.RANGES["log_gate"]},
    ),
    "neural_memory": Call(
        neural_memory.neural_memory,
        HEADS | SHARES | {"segment_ids": IDS},
        neural_memory.RANGES,
        {"weights": (ones(1, 2, 2),), "chunk_size": 2},
    ),
    "modal_conv": Call(
        modal_conv.modal_conv,
        STREAM | {"log_poles": -ones(2, 3), "residues": ones(2, 3)},
        modal_conv.RANGES,
    ),
    "long_conv": Call(long_conv.long_conv, STREAM | {"filter": ones(2, 3)}),
    "blocked_conv": Call(blocked_conv.blocked_conv, STREAM | {"filter": ones(2, 3)}),
    "short_conv": Call(short_conv.short_conv, STREAM | {"taps": ones(2, 3)}),
    "linear_scan": Call(
        linear_scan.linear_scan, {"a": ones(1, 4, 2), "b": ones(1, 4, 2)}, linear_scan.RANGES
    ),
    "routed_lora": Call(
        routed_lora.routed_lora,
        {"x": ones(1, 4, 2), "w": ones(2, 3), "v": ones(2, 2), "u": ones(2, 3), "code": ones(1, 4, 2)},
        routed_lora.RANGES,
    ),
    "hash_embedding": Call(
        hash_embedding.hash_embedding,
        {"table": ones(6, 2), "rows": np.array([[0, 2]], np.int32)},
        {"rows": Range(0, 2)},
    ),
    "byte_head.cross_entropy": Call(
        byte_head.cross_entropy,
        {"x": ones(1, 4, 2), "head": ones(2, 5), "targets": np.zeros((1, 4), np.int32)},
        {"targets": Range(0, 4)},
    ),
    "patch_attention.pool": Call(
        patch_attention.pool,
        BLOCKS | {"patch_ids": np.array([[[0, 1, 1, 3]]], np.int32)},
        {"patch_ids": Range(0, 3)},
    ),
    "patch_attention.lookup": Call(
        patch_attention.lookup, BLOCKS | LATEST, {"latest": Range(most=3), "bias": Range()}, {"look_back": 1}
    ),
    "attention": Call(
        attention.attention,
        {name: ones(1, 4, 2, 2) for name in "qkv"} | {"alibi_slopes": ones(2)},
        attention.RANGES,
        {"mask": masks.CAUSAL},
    ),
}
"""Every operation that takes gates, codes, ids of rows or segment ids."""


def excluded(range: Range, dtype: np.dtype) -> list[Any]:
    """Numbers that a range does not hold."""
    ends = [None if end is None else end + way for end, way in ((range.least, -1), (range.most, 1))]
    found = [end for end in ends if end is not None]
    if dtype.kind == "i":
        return found
    found = [float(np.nextafter(np.float32(x), np.float32(x * 2))) if abs(x) > 1e6 else x for x in found]
    return [*found, NAN, INF, *([-INF] if range.finite else [])]


def spoilt(x: np.ndarray, value: Any, token: int | None = None) -> np.ndarray:
    """The array with another number in front, or throughout the first row's token of that place."""
    x = x.copy()
    x[(0,) * x.ndim if token is None else (0, token)] = value
    return x


def unread(call: Call) -> dict[str, np.ndarray]:
    """The call's arrays, with NaN at holes and infinity at padding, which are not looked at."""
    tokens = [name for name, range in call.ranges.items() if range.per_token]
    return {
        name: spoilt(spoilt(x, NAN, 3), INF, 4) if name in tokens else x for name, x in call.arrays.items()
    }


@pytest.mark.parametrize("name", CALLS)
def test_values_out_of_their_ranges_are_named(name: str) -> None:
    op, _, ranges, options = CALLS[name]
    arrays = unread(CALLS[name])
    explain_call(op, None, **arrays, **options)
    told = {(key, value) for key, range in ranges.items() for value in excluded(range, arrays[key].dtype)}
    bad = [(key, spoilt(arrays[key], value), re.escape(f"{value}"[:6])) for key, value in told]
    if "segment_ids" in arrays:
        bad += [("segment_ids", ids, "document 1 again") for ids in (AGAIN, SPLIT)]
    for key, x, value in bad:
        for given in (x, jnp.asarray(x)) if value in ("nan", "document 1 again") else (x,):
            with pytest.raises(
                ValueError, match=rf"^{name}: {key} must .*, got {value}.* at \[.*: \w+"
            ) as error:
                explain_call(op, None, **arrays | {key: given}, **options)
            assert "\n" not in str(error.value)


@pytest.mark.slow(days=28, group="properties of kernels", every="hash_embedding")
@pytest.mark.parametrize("name", ["gated_delta_rule", "modal_conv", "hash_embedding"])
def test_values_are_checked_inside_jit_within_the_block_only(name: str) -> None:
    op, _, ranges, options = CALLS[name]
    arrays = unread(CALLS[name])

    def checks(given: Mapping[str, Any]) -> tuple[()]:
        op(**given, **options)
        return ()  # the operation itself is not compiled

    with jaxblt.checked_ops():
        checked = jax.jit(checkify.checkify(checks))
        assert checked(arrays)[0].get() is None
        assert "check[" in str(jax.make_jaxpr(checks)(arrays))
    assert "check[" not in str(jax.make_jaxpr(checks)(arrays))
    for key, range in ranges.items():
        for value in excluded(range, arrays[key].dtype):
            with jaxblt.checked_ops():
                error, _ = checked(arrays | {key: spoilt(arrays[key], value)})
            assert re.match(rf"{name}: {key} must {re.escape(str(range)[:7])}.*, got ", str(error.get())), (
                value
            )


def test_documents_lie_in_one_piece_and_where_they_should() -> None:
    good = np.array([[3, 3, 1, -1, 1, 0, 2, -2], [1, 1, 2, 2, -2, 2, 2, 2]], np.int32)
    late = r"documents must start at multiples of 2, .*, got document 2 from \[1 3\]: pack them so, or promise less"
    shifted = np.array([[3, 3, 1, -1, 1, 0, 2, -2], [1, 1, 1, 2, -2, 2, 2, 2]], np.int32)
    cases = ((AGAIN, 1, r"contiguous, got document 1 again at \[0 5\]"), (shifted, 2, late))
    for bad, alignment, words in cases:
        check_documents(good, alignment)
        with pytest.raises(ValueError, match=words):
            check_documents(bad, alignment)
        with jaxblt.checked_ops():
            check = jax.jit(
                checkify.checkify(lambda ids, alignment=alignment: check_documents(ids, alignment))
            )
            assert check(good)[0].get() is None
            assert re.search(words, str(check(bad)[0].get()))
    with pytest.raises(
        ValueError, match=r"start with their row, as packed=False promises, got document 1 from \[0 2"
    ):
        check_documents(good, None)


def test_mixers_keep_to_their_promises() -> None:
    x, ids = jnp.ones((1, 8, 4)), jnp.asarray(AGAIN)
    late = jnp.asarray(np.array([[1, 1, 1, 2, 2, 2, 2, 2]], np.int32))
    memory = NeuralMemoryConfig(dim=4, num_heads=2, chunk_size=2, segment_alignment=2)
    for config, given, words in (
        (HyenaConfig(dim=4), ids, "must be contiguous, got document 1 again at"),
        (AttentionConfig(dim=4, num_heads=2), ids, "must be contiguous"),
        (HyenaConfig(dim=4, segment_alignment=2), late, "start at multiples of 2, .* got document 2 from"),
        (
            HyenaConfig(dim=4, packed=False),
            late,
            "start with their row, as packed=False promises, got document 2",
        ),
        (AttentionConfig(dim=4, num_heads=2, packed=False), late, "start with their row"),
        (memory, late, "start at multiples of 2"),
        (replace(memory, segment_alignment=1, packed=False), late, "start with their row"),
    ):
        with pytest.raises(ValueError, match=words):
            config.build().apply({"params": {}}, x, segment_ids=given)


@pytest.mark.slow(days=28, group="costly")
def test_a_model_is_checked_through_scan_remat_and_gradient() -> None:
    config = StackConfig(dim=4, num_layers=2, pattern=("recurrence",), mlp_dim=0, remat="full")
    stack, x = Stack(replace(config, mixers={"R": GatedRecurrenceConfig(dim=4)})), jnp.ones((1, 8, 4))
    params = drawn(stack, x)

    def loss(params: Any, ids: Any) -> jax.Array:
        return jnp.sum(stack.apply(params, x, segment_ids=ids)[0])  # type: ignore[index]

    with jaxblt.checked_ops():
        jax.eval_shape(checkify.checkify(jax.grad(loss)), params, IDS)
        checked = jax.jit(checkify.checkify(loss))
        assert checked(params, IDS)[0].get() is None
        error, _ = checked(params, AGAIN)
    with pytest.raises(checkify.JaxRuntimeError, match="got document 1 again at"):
        error.throw()


def test_ids_of_bytes_are_seen_inside_jit() -> None:
    with jaxblt.checked_ops():
        error, _ = jax.jit(checkify.checkify(lambda ids: check_ids(ids, 260)))(np.array([[3, 300]]))
    assert "bytes: ids must lie in 0..259, got 300 at [0 1]" in error.get()


def test_large_arrays_are_looked_at_inside_the_block_only() -> None:
    large = {"a": jnp.full((SMALL + 1,), NAN)}
    check_values("op", {"a": Range()}, large)
    with jaxblt.checked_ops(), pytest.raises(ValueError, match=r"op: a must be finite, got nan at \[0\]"):
        check_values("op", {"a": Range()}, large)


def test_a_check_without_checkify_is_refused_by_jax() -> None:
    with jaxblt.checked_ops(), pytest.raises(ValueError, match="not functionalized"):
        jax.jit(linear_scan.linear_scan)(ones(4, 2), ones(4, 2))


def test_a_scale_is_a_finite_number() -> None:
    q = ones(1, 4, 1, 2)
    for scale, error in ((NAN, ValueError), (INF, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"scale must be (finite|a number), got"):
            gated_linear_attention.gated_linear_attention(q, q, q, scale=scale)
    with pytest.raises(TypeError, match="scale must be a number, got None"):
        routed_lora.routed_lora(ones(1, 4, 2), None, ones(2, 2), ones(2, 3), scale=None)  # pyright: ignore
