"""Partial attention: what it merges to, and what its gradients add up to."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import _compat
from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import (
    EMPTY_LSE,
    attention,
    cudnn,
    masks,
    merge_partials,
    partial_attention,
    partial_attention_backward,
)
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.attention import dense_kernel
from tests.pallas_kernels.attention.cases import Call
from tests.tolerances import assert_close, assert_norms_close

SIZES = {"heads": 4, "groups": 2, "head_dim": 64, "dtype": jnp.bfloat16}
CALLS = (
    Call(name="causal", queries=66, heads=4, groups=2),
    Call(name="causal_blocks", queries=600, heads=2, groups=1),
    Call(name="segments", queries=90, segments=True, heads=4, groups=2, scale=0.3),
    Call(name="bf16_blocks", queries=540, dtype=jnp.bfloat16, head_dim=16),
)
CUDNN_CALLS = (
    Call(name="causal", queries=512, **SIZES),
    Call(name="one_head", queries=256, **SIZES | {"groups": 4}),
)


def by_halves(call, implementation):
    """Early and late halves of the queries against those of the keys, as a ring has them; and the gradients."""

    def run(q, k, v, ids, do):
        half, options = call.queries // 2, {"scale": call.scale, "implementation": implementation}
        cut = {"early": slice(0, half), "late": slice(half, None)}
        meet = {("early", "early"): True, ("late", "early"): False, ("late", "late"): True}

        def square(row, column):
            at, there = cut[row], cut[column]
            mask = masks.band(meet[row, column])
            mask &= masks.FULL if ids is None else masks.documents(ids[:, at], ids[:, there])
            return (q[:, at], k[:, there], v[:, there]), mask

        def attend(pair):
            qkv, mask = square(*pair)
            return partial_attention(*qkv, mask, **options)

        found = {pair: attend(pair) for pair in meet}
        merged = {
            "early": found["early", "early"],
            "late": merge_partials(found["late", "early"], found["late", "late"]),
        }
        dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for row, column in meet:
            qkv, mask = square(row, column)
            gradients = partial_attention_backward(*qkv, merged[row], do[:, cut[row]], mask, **options)
            one, two, three = (x.astype(jnp.float32) for x in gradients)
            dq, dk = dq.at[:, cut[row]].add(one), dk.at[:, cut[column]].add(two)
            dv = dv.at[:, cut[column]].add(three)
        o = jnp.concatenate([merged[row].o.astype(jnp.float32) for row in cut], 1)
        return o, (dq, dk, dv)

    return jax.jit(run)


def check(call, implementation):
    arrays = call.arrays()
    ids = arrays.pop("kv_segment_ids", None)
    arrays.pop("q_segment_ids", None)
    ids = None if ids is None else jnp.maximum(ids, 0)

    def dense(a):
        mask = masks.band(call.causal, call.window) & masks.documents(ids)
        return attention(**a, mask=mask, scale=call.scale, implementation="reference")

    floats = {n: jnp.asarray(x, jnp.float32) for n, x in arrays.items()}
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal(arrays["q"].shape), call.dtype)
    o, grads = by_halves(call, implementation)(*arrays.values(), ids, cotangent)
    want, want_grads = op_suite.value_and_grads(dense, floats, cotangent.astype(jnp.float32))
    assert_close(o, want, call.dtype, call.queries, "values")
    for name, got in zip("qkv", grads, strict=True):
        assert_close(got, want_grads[name], call.dtype, call.queries, f"gradient of {name}")


@pytest.mark.slow(days=28, group="properties of kernels", every=("causal-reference", "segments-xla"))
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_halves_merge_to_the_whole(call, implementation):
    check(call, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CUDNN_CALLS, ids=str)
def test_halves_by_cudnn_merge_to_the_whole(call):
    check(call, "cudnn")


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_partial")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_partial_attention_without_a_visible_key_merges_to_nothing(implementation):
    q = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    ids, none = jnp.ones((1, 6), jnp.int32), jnp.zeros((1, 6), jnp.int32)
    options = {"implementation": implementation}
    empty = partial_attention(q, q, q, masks.documents(ids, none), **options)
    some = partial_attention(q, q, q, masks.documents(ids, ids), **options)
    assert not empty.o.any()
    np.testing.assert_array_equal(empty.lse, np.float32(EMPTY_LSE))
    for pair in ((empty, some), (some, empty)):
        assert_close(merge_partials(*pair).o, some.o)
        assert_close(merge_partials(*pair).lse, some.lse)
    nothing = merge_partials(empty, empty)
    assert not nothing.o.any()
    np.testing.assert_array_equal(nothing.lse, np.float32(EMPTY_LSE))
    for gradient in partial_attention_backward(q, q, q, nothing, q, masks.documents(ids, none), **options):
        assert not gradient.any()


def check_prefixes(implementation, dtype, queries, *, both=False):
    """Prefixes of keys, and of queries if `both`, some empty, against attention to a document of those prefixes."""
    lengths = jnp.asarray([queries, 5, 0, queries - 1], jnp.int32)
    q_lengths = jnp.asarray([queries - 2, queries, 7, 0] if both else [queries] * 4, jnp.int32)
    q, k, v, do = jax.random.normal(jax.random.key(1), (4, 4, queries, 2, 64)).astype(dtype)
    sees, seen = (jnp.arange(queries)[None] < x[:, None] for x in (q_lengths, lengths))
    k, v = (jnp.where(seen[..., None, None], x, 0) for x in (k, v))
    visible = masks.documents(sees.astype(jnp.int32), seen.astype(jnp.int32))
    for causal in (True, False):

        @jax.jit
        def run(q, k, v, do, causal=causal):
            mask = masks.band(causal) & masks.key_lengths(lengths)
            mask &= masks.query_lengths(q_lengths) if both else masks.FULL
            found = partial_attention(q, k, v, mask, implementation=implementation)
            # The other queries see keys elsewhere.
            o = jnp.where(sees[..., None, None], found.o, jnp.ones((), found.o.dtype))
            merged = found._replace(o=o, lse=jnp.where(sees[:, None], found.lse, 0.0))
            return found, partial_attention_backward(q, k, v, merged, do, mask, implementation=implementation)

        def dense(a, causal=causal):
            return attention(**a, mask=masks.band(causal) & visible, implementation="reference")

        found, grads = run(q, k, v, do)
        floats = {name: x.astype(jnp.float32) for name, x in zip("qkv", (q, k, v), strict=True)}
        want, want_grads = op_suite.value_and_grads(dense, floats, do.astype(jnp.float32))
        assert_close(found.o, want, dtype, queries, f"values, causal={causal}")
        nothing = np.asarray(~sees | (lengths == 0)[:, None])
        np.testing.assert_array_equal(np.asarray(found.lse.max(1) == EMPTY_LSE), nothing)
        for name, got in zip("qkv", grads, strict=True):
            what = f"gradient of {name}, causal={causal}"
            if implementation == "cudnn":
                assert_norms_close(got, want_grads[name], range(4), dtype, queries, what)
                hidden = nothing if name == "q" else np.asarray(~seen | (q_lengths == 0)[:, None])
                assert not np.asarray(got)[hidden].any()
            else:
                assert_close(got, want_grads[name], dtype, queries, what)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_partial")
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_lengths(implementation, both):
    check_prefixes(implementation, jnp.float32, 21, both=both)


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("queries", [640, 255])
def test_lengths_by_cudnn(queries, both):
    check_prefixes("cudnn", jnp.bfloat16, queries, both=both)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_partial")
@pytest.mark.parametrize("both", [False, True])
def test_what_the_kernel_leaves_beyond_lengths_is_not_taken(both, monkeypatch):
    monkeypatch.setattr(_compat, "cudnn_attention", dense_kernel.attention)
    monkeypatch.setattr(_compat, "cudnn_attention_gradients", dense_kernel.gradients)
    absent = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    with compiling_for(absent):
        check_prefixes("cudnn", jnp.bfloat16, 21, both=both)


@pytest.mark.parametrize(
    ("shape", "says"), [((), "must have shape"), ((2, 0), "0 equal runs"), ((2, 1, 1), "must have shape")]
)
def test_lengths_of_no_such_shape_are_refused(shape, says):
    q = jnp.zeros((2, 8, 1, 4))
    with pytest.raises(ValueError, match=says):
        partial_attention(q, q, q, masks.key_lengths(jnp.zeros(shape, jnp.int32)))


def test_cudnn_is_never_told_of_lengths_beyond_the_tokens():
    mask = masks.query_lengths(jnp.asarray([-3, 5, 99])) & masks.key_lengths(jnp.asarray([99, 0, 6]))
    found = cudnn._lengths(mask, 3, 8, 6)
    np.testing.assert_array_equal(found, [[0, 5, 8], [6, 0, 6]])


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("queries", [256, 255])
@pytest.mark.parametrize("window", [None, 64])
def test_partial_attention_by_cudnn_lowers_for_cuda(queries, window, lengths, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    arrays = Call(name="lower", queries=queries, **SIZES).arrays()
    mask = masks.band(True, window)
    if lengths:
        mask &= masks.query_lengths(jnp.full(2, 50)) & masks.key_lengths(jnp.full(2, 100))
    assert cudnn.why_not_partial(Device("gpu", (9, 0), "NVIDIA H200"), *arrays.values(), mask=mask) is None

    def run(q, k, v):
        o, lse = cudnn.attention_with_lse(q, k, v, mask)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, queries), jnp.float32)
        return cudnn.gradients_given_lse(q, k, v, o, lse, q, mask)

    text = jax.jit(run).trace(*arrays.values()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1


@pytest.mark.parametrize(
    ("mask", "keys", "reason"),
    [
        (masks.documents(*(jnp.ones((2, 64), jnp.int32),) * 2), 64, "documents of the same tokens"),
        (masks.window(9) & masks.documents(jnp.ones((2, 64), jnp.int32)), 64, "no two-sided windows"),
        (masks.FULL, 63, "even lengths alone, not 63 keys"),
    ],
)
def test_why_cudnn_does_not_run_it(mask, keys, reason):
    shape = jax.ShapeDtypeStruct((2, keys, 4, 64), jnp.bfloat16)
    assert reason in cudnn.why_not_partial(Device("gpu", (9, 0), "NVIDIA H200"), shape, shape, shape, mask)
