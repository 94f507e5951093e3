"""Parts of the keys: what they merge to, and what their gradients add up to."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import _compat
from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import EMPTY_LSE, attend_part, attention, cudnn, merge_parts, pull_part
from pallas_kernels.attention.mask import Mask
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


def in_parts(call, implementation):
    """Early and late halves of the queries against those of the keys, as a ring has them; and the gradients."""

    def run(q, k, v, ids, do):
        half, options = call.queries // 2, {"scale": call.scale, "implementation": implementation}
        cut = {"early": slice(0, half), "late": slice(half, None)}
        meet = {("early", "early"): True, ("late", "early"): False, ("late", "late"): True}

        def part(row, column):
            at, there = cut[row], cut[column]
            marks = {} if ids is None else {"q_segment_ids": ids[:, at], "kv_segment_ids": ids[:, there]}
            return (q[:, at], k[:, there], v[:, there]), options | marks | {"causal": meet[row, column]}

        parts = {pair: attend_part(*part(*pair)[0], **part(*pair)[1]) for pair in meet}
        merged = {
            "early": parts["early", "early"],
            "late": merge_parts(parts["late", "early"], parts["late", "late"]),
        }
        dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
        for row, column in meet:
            arrays, given = part(row, column)
            pulled = pull_part(*arrays, merged[row], do[:, cut[row]], **given)
            one, two, three = (x.astype(jnp.float32) for x in pulled)
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
        return attention(
            **a, **call.options, q_segment_ids=ids, kv_segment_ids=ids, implementation="reference"
        )

    floats = {n: jnp.asarray(x, jnp.float32) for n, x in arrays.items()}
    cotangent = jnp.asarray(np.random.default_rng(3).standard_normal(arrays["q"].shape), call.dtype)
    o, grads = in_parts(call, implementation)(*arrays.values(), ids, cotangent)
    want, want_grads = op_suite.value_and_grads(dense, floats, cotangent.astype(jnp.float32))
    assert_close(o, want, call.dtype, call.queries, "values")
    for name, got in zip("qkv", grads, strict=True):
        assert_close(got, want_grads[name], call.dtype, call.queries, f"gradient of {name}")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_parts_merge_to_the_whole(call, implementation):
    check(call, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CUDNN_CALLS, ids=str)
def test_parts_by_cudnn_merge_to_the_whole(call):
    check(call, "cudnn")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_part_without_a_visible_key_merges_to_nothing(implementation):
    q = jax.random.normal(jax.random.key(0), (1, 6, 2, 8))
    ids, none = jnp.ones((1, 6), jnp.int32), jnp.zeros((1, 6), jnp.int32)
    options = {"causal": False, "q_segment_ids": ids, "implementation": implementation}
    empty = attend_part(q, q, q, kv_segment_ids=none, **options)
    some = attend_part(q, q, q, kv_segment_ids=ids, **options)
    assert not empty.o.any()
    np.testing.assert_array_equal(empty.lse, np.float32(EMPTY_LSE))
    for pair in ((empty, some), (some, empty)):
        assert_close(merge_parts(*pair).o, some.o)
        assert_close(merge_parts(*pair).lse, some.lse)
    nothing = merge_parts(empty, empty)
    assert not nothing.o.any()
    np.testing.assert_array_equal(nothing.lse, np.float32(EMPTY_LSE))
    for gradient in pull_part(q, q, q, nothing, q, kv_segment_ids=none, **options):
        assert not gradient.any()


def check_prefixes(implementation, dtype, queries, *, both=False):
    """Prefixes of keys, and of queries if `both`, some empty, against attention to a document of those prefixes."""
    lengths = jnp.asarray([queries, 5, 0, queries - 1], jnp.int32)
    q_lengths = jnp.asarray([queries - 2, queries, 7, 0] if both else [queries] * 4, jnp.int32)
    q, k, v, do = jax.random.normal(jax.random.key(1), (4, 4, queries, 2, 64)).astype(dtype)
    sees, seen = (jnp.arange(queries)[None] < x[:, None] for x in (q_lengths, lengths))
    k, v = (jnp.where(seen[..., None, None], x, 0) for x in (k, v))
    ids = {"q_segment_ids": sees.astype(jnp.int32), "kv_segment_ids": seen.astype(jnp.int32)}
    for causal in (True, False):

        @jax.jit
        def run(q, k, v, do, causal=causal):
            given = {"causal": causal, "kv_lengths": lengths, "implementation": implementation}
            given |= {"q_lengths": q_lengths} if both else {}
            part = attend_part(q, k, v, **given)
            # The other queries see keys elsewhere.
            o = jnp.where(sees[..., None, None], part.o, jnp.ones((), part.o.dtype))
            merged = part._replace(o=o, lse=jnp.where(sees[:, None], part.lse, 0.0))
            return part, pull_part(q, k, v, merged, do, **given)

        def dense(a, causal=causal):
            return attention(**a, **ids, causal=causal, implementation="reference")

        part, grads = run(q, k, v, do)
        floats = {name: x.astype(jnp.float32) for name, x in zip("qkv", (q, k, v), strict=True)}
        want, want_grads = op_suite.value_and_grads(dense, floats, do.astype(jnp.float32))
        assert_close(part.o, want, dtype, queries, f"values, causal={causal}")
        nothing = np.asarray(~sees | (lengths == 0)[:, None])
        np.testing.assert_array_equal(np.asarray(part.lse.max(1) == EMPTY_LSE), nothing)
        for name, got in zip("qkv", grads, strict=True):
            what = f"gradient of {name}, causal={causal}"
            if implementation == "cudnn":
                assert_norms_close(got, want_grads[name], range(4), dtype, queries, what)
                hidden = nothing if name == "q" else np.asarray(~seen | (q_lengths == 0)[:, None])
                assert not np.asarray(got)[hidden].any()
            else:
                assert_close(got, want_grads[name], dtype, queries, what)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_parts_with_lengths(implementation, both):
    check_prefixes(implementation, jnp.float32, 21, both=both)


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("queries", [640, 255])
def test_parts_with_lengths_by_cudnn(queries, both):
    check_prefixes("cudnn", jnp.bfloat16, queries, both=both)


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
        attend_part(q, q, q, causal=False, kv_lengths=jnp.zeros(shape, jnp.int32))


def test_cudnn_is_never_told_of_lengths_beyond_the_tokens():
    q, k = jnp.zeros((3, 8, 1, 4)), jnp.zeros((3, 6, 1, 4))
    mask = Mask(False, q_lengths=jnp.asarray([-3, 5, 99]), kv_lengths=jnp.asarray([99, 0, 6]))
    found = cudnn._lengths(mask, q, k)
    np.testing.assert_array_equal(found, [[0, 5, 8], [6, 0, 6]])


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("queries", [256, 255])
@pytest.mark.parametrize("window", [None, 64])
def test_cudnn_parts_lower_for_cuda(queries, window, lengths, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    arrays = Call(name="lower", queries=queries, **SIZES).arrays()
    both = {"q_lengths": jnp.full(2, 50), "kv_lengths": jnp.full(2, 100)} if lengths else {}
    mask = Mask(True, window, **both)
    assert cudnn.why_not_part(Device("gpu", (9, 0), "NVIDIA H200"), *arrays.values(), mask=mask) is None

    def run(q, k, v):
        o, lse = cudnn.attention_with_lse(q, k, v, mask)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, queries), jnp.float32)
        return cudnn.gradients_given_lse(q, k, v, o, lse, q, mask)

    text = jax.jit(run).trace(*arrays.values()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1


@pytest.mark.parametrize(
    ("mask", "keys", "reason"),
    [
        (Mask(False, None, *(jnp.ones((2, 64), jnp.int32),) * 2), 64, "segment ids of the same tokens alone"),
        (
            Mask(False, 9, *(jnp.ones((2, 64), jnp.int32),) * 2, same_tokens=True),
            64,
            "no two-sided windows",
        ),
        (Mask(False), 63, "even lengths alone, not 63 keys"),
    ],
)
def test_why_cudnn_has_no_such_part(mask, keys, reason):
    shape = jax.ShapeDtypeStruct((2, keys, 4, 64), jnp.bfloat16)
    assert reason in cudnn.why_not_part(Device("gpu", (9, 0), "NVIDIA H200"), shape, shape, shape, mask)
