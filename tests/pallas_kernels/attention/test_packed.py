"""Documents by their places: found as by a loop; attention within them, emulated here, by cuDNN on a GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import (
    attention,
    cudnn_packed,
    documents,
    masks,
    partial_attention,
    partial_attention_backward,
    reference,
)
from pallas_kernels.attention.arguments import without_padding, zero_where_not
from pallas_kernels.attention.documents import find_documents, longest_by_class
from pallas_kernels.attention.masks import EMPTY_LSE
from pallas_kernels.attention.rules import Interval
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.attention import ragged_kernel
from tests.pallas_kernels.op_suite import OpCase
from tests.tolerances import assert_close, assert_norms_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
ROWS, LENGTH = 3, 64


@pytest.fixture
def small(monkeypatch):
    """Classes of 64, 32, 16 and 8 tokens for rows of 64."""
    monkeypatch.setattr(documents, "RATIO", 2)
    monkeypatch.setattr(documents, "SHORTEST", 8)


def row_of(lengths, length, gap=0):
    """Ids of a row with documents of these lengths, `gap` places of padding behind each, and more at the end."""
    ids = [x for i, n in enumerate(lengths) for x in [i + 1] * n + [0] * gap]
    return np.array((ids + [0] * length)[:length], np.int32)


def random_rows(rng, rows, length, mean):
    """Rows of documents of `mean` tokens, some with gaps, all with up to 8 places of padding at the end."""
    found = np.zeros((rows, length), np.int32)
    for row in found:
        used = length - int(rng.integers(0, 9))
        row[:used] = row_of(rng.geometric(1 / mean, size=length), used, int(rng.integers(0, 2)))
    return found


def by_loop(ids):
    """Start and length of every run of an id > 0, row after row."""
    found = []
    for at, x in enumerate(ids.reshape(-1)):
        if x > 0 and at % ids.shape[1] and ids.reshape(-1)[at - 1] == x:
            found[-1][1] += 1
        elif x > 0:
            found.append([at, 1])
    return found


@pytest.mark.parametrize("mean", [1, 3, 9, 30, 200])
def test_documents_are_found_as_by_a_loop(small, mean):
    rng, find, sizes = np.random.default_rng(mean), jax.jit(find_documents), longest_by_class(LENGTH)
    assert sizes == (64, 32, 16, 8)
    for _ in range(6):
        ids = random_rows(rng, ROWS, LENGTH, mean)
        layout, expected = jax.tree.map(np.asarray, find(ids)), by_loop(ids)
        of_class = [[d for d in expected if sum(d[1] <= s for s in sizes[1:]) == c] for c in range(4)]
        rooms = [ROWS * LENGTH * 2 // size for size in sizes]
        assert layout.complete == (len(of_class[3]) <= rooms[3])
        for found, wanted, room in zip(layout.documents, of_class, rooms, strict=True):
            wanted = [*wanted, *[[ids.size, 0]] * room][:room]
            assert np.stack(found, 1).tolist() == wanted
        number, slot, offset = (x.reshape(-1) for x in layout[1:4])
        assert ((number >= 0) == (ids.reshape(-1) > 0)).all()
        for start, length in expected:
            place, here = slice(start, start + length), number[start]
            assert (number[place] == here).all()
            assert (slot[place] == of_class[here].index([start, length])).all()
            assert (offset[place] == np.arange(length)).all()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_class_but_the_last_overflows(small, number):
    """As many documents as fit that are just too long for the next class."""
    size = longest_by_class(LENGTH)[number + 1] + 1
    ids = np.stack([row_of([size] * (LENGTH // size), LENGTH)] * ROWS)
    layout = jax.jit(find_documents)(ids)
    assert layout.complete
    assert int((layout.documents[number].lengths == size).sum()) == len(by_loop(ids))


@pytest.mark.parametrize(
    ("row", "complete"),
    [
        (row_of([20, 30], LENGTH), True),
        (row_of([8] * 8, LENGTH), True),
        (row_of([4] * 16, LENGTH), True),
        (row_of([3] * 21, LENGTH), False),  # 63 documents where 48 have room
        (np.array([1, 1, -1, 1] * 16), False),
        (np.array([1, 1, 2, -2] + [0] * 60), True),
        (np.array([2, 2, 1, 1] + [0] * 60), False),
        (np.array([1, 2, 1, 2] + [0] * 60), False),
        (np.zeros(LENGTH), True),
    ],
)
def test_what_is_complete(small, row, complete):
    ids = np.stack([row] * ROWS).astype(np.int32)
    assert jax.jit(find_documents)(ids).complete == complete


@pytest.mark.parametrize(
    ("length", "sizes"),
    [
        (512, (512,)),
        (4096, (4096, 512)),
        (8192, (8192, 1024)),
        (4608, (4608, 576)),
        (65536, (65536, 8192, 1024)),
    ],
)
def test_classes_of_real_rows(length, sizes):
    assert longest_by_class(length) == sizes


def arrays_of(ids, heads, groups, width, dtype=jnp.float32):
    rng, (rows, length) = np.random.default_rng(0), ids.shape
    shapes = {"q": heads, "k": groups, "v": groups}
    arrays = {
        name: jax.device_put(rng.standard_normal((rows, length, n, width)).astype(dtype))
        for name, n in shapes.items()
    }
    return arrays | {"ids": jnp.asarray(ids, jnp.int32)}


def case_of(arrays, *, causal=True, window=None, scale=None, lengths=None):
    """Attention within documents as a case of the property suite; `lengths` cut the rows."""

    def of(attend, a):
        mask = masks.band(causal, window) & masks.documents(a["ids"])
        mask &= masks.FULL if lengths is None else masks.token_lengths(lengths)
        q, k, v, valid = without_padding(a["q"], a["k"], a["v"], mask)
        return zero_where_not(valid, attend(q, k, v, mask, scale=scale))

    size = arrays["ids"].shape[1]
    nothing = np.asarray(arrays["ids"]) <= 0
    if lengths is not None:
        nothing |= np.arange(size) >= np.asarray(lengths)[:, None]
    return OpCase(
        name="packed",
        run=lambda a: of(cudnn_packed.attention, a),
        reference=lambda a: of(reference.attention, a),
        arrays=arrays,
        unused=dict.fromkeys("qkv", jnp.asarray(nothing)),
        silent=nothing,
        terms=size,
    )


def emulate(monkeypatch, forward=ragged_kernel.Forward, backward=ragged_kernel.Backward):
    """These instead of cuDNN's kernels, for rows of 64 tokens that have two classes of documents."""
    monkeypatch.setattr(documents, "RATIO", 4)
    monkeypatch.setattr(documents, "SHORTEST", 16)
    monkeypatch.setattr(cudnn_packed, "MULTIPLE", 64)
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_fwd_p", forward)
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_p", backward)


OPTIONS = ({}, {"window": 5, "scale": 0.3}, {"causal": False, "lengths": jnp.asarray([35, 0, 20])})


@pytest.mark.slow(days=28, group="properties of kernels", every="plain")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "_".join(o) or "plain")
def test_within_documents(monkeypatch, options):
    """With nothing else able to give the result."""

    def no_output(q, *_, **__):
        x = jnp.full(q.shape, jnp.nan)
        return x, x[..., 0].swapaxes(1, 2)

    def no_gradients(*arrays, **_):
        return tuple(jnp.full(x.shape, jnp.nan) for x in arrays[:3])

    emulate(monkeypatch)
    monkeypatch.setattr(cudnn_packed.xla, "attention_with_lse", no_output)
    monkeypatch.setattr(cudnn_packed.xla, "gradients_given_lse", no_gradients)
    ids = np.stack([row_of(n, 51, 1) for n in ([30, 9, 3], [20, 15, 5, 5], [1, 30, 2])])
    case = case_of(arrays_of(ids, 4, 2, 8), **options)
    op_suite.check_reference(case)
    op_suite.check_poison(case)


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("causal", [True, False])
def test_partial_attention_with_its_log_sum_exp(monkeypatch, causal):
    """And its gradients where other keys are seen too, so that p sums up to less than 1."""
    emulate(monkeypatch)
    ids = np.stack([row_of(n, 51, 1) for n in ([30, 9, 3], [20, 15, 5, 5])])
    a, rng = arrays_of(ids, 4, 2, 8), np.random.default_rng(2)
    q, k, v, ids = a.values()
    mask, tokens = masks.band(causal) & masks.documents(ids), (ids > 0)[..., None, None]
    o, lse = jax.jit(cudnn_packed.attention_with_lse)(q, k, v, mask)
    want = jax.jit(reference.attention_with_lse)(q, k, v, mask)
    assert_close(o, want[0])
    heads_last, told = lse.swapaxes(1, 2), want[1].swapaxes(1, 2)
    assert_close(heads_last[ids > 0], told[ids > 0])
    assert (heads_last[ids <= 0] == EMPTY_LSE).all()
    do, o = (jnp.where(tokens, jnp.asarray(rng.standard_normal(q.shape), jnp.float32), 0) for _ in range(2))
    gradients = jax.jit(cudnn_packed.gradients_given_lse)(q, k, v, o, lse + 0.7, do, mask)
    expected = jax.jit(reference.gradients_given_lse)(q, k, v, o, lse + 0.7, do, mask)
    for name, got, like in zip("qkv", gradients, expected, strict=True):
        assert_close(got, like, n=51, what=name)


@pytest.mark.slow(days=28, group="properties of kernels")
def test_runs_on_xla_where_documents_are_not_complete(monkeypatch):
    class NoOutput:
        @staticmethod
        def bind(*operands, **_):
            q, room = operands[0], operands[4].size
            return q * jnp.nan, jnp.full((room, q.shape[2], q.shape[1]), jnp.nan)

    class NoGradients:
        @staticmethod
        def bind(*operands, **_):
            return [x * jnp.nan for x in operands[:3]]

    emulate(monkeypatch, NoOutput, NoGradients)
    ids = np.stack([row_of([20, 30], 51), np.array([1, 1, -1] * 17)])
    op_suite.check_reference(case_of(arrays_of(ids, 2, 1, 8), window=7))


def test_ids_of_queries_that_are_not_those_of_keys(monkeypatch):
    """Only XLA's form can be right."""
    emulate(monkeypatch)
    ours, theirs = (jnp.asarray(row_of(n, 32)[None]) for n in ([10, 20], [20, 10]))
    a, mask = arrays_of(np.asarray(ours), 2, 2, 8), masks.CAUSAL & masks.documents(ours, theirs)
    o = jax.jit(cudnn_packed.attention)(a["q"], a["k"], a["v"], mask)
    np.testing.assert_allclose(o, jax.jit(reference.attention)(a["q"], a["k"], a["v"], mask), atol=1e-5)


@pytest.mark.parametrize("window", [None, 512])
def test_lowers_for_cuda_from_the_public_function(window):
    a = arrays_of(np.ones((1, 8192), np.int32), 4, 2, 64, jnp.bfloat16)

    def gradients(q, k, v, ids):
        mask = masks.band(True, window) & masks.documents(ids)
        o, vjp = jax.vjp(lambda *x: attention(*x, mask), q, k, v)
        return vjp(o)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(a.values()))
    absent = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    with compiling_for(absent):
        text = jax.jit(gradients).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    for name in ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("):
        assert text.count(name) == 2
    assert text.count(r"\22max_seg_per_batch\22: 8") == 4
    assert text.count(rf"\22sliding_window_length\22: {window or 0}") == 4
    assert text.count("PADDING_CAUSAL") == 4


IDS = jax.ShapeDtypeStruct((1, 128), jnp.int32)


def why_not(device=HOPPER, keys=128, q_heads=2, rows=1, slopes=None, mask=None):
    q = jax.ShapeDtypeStruct((rows, 128, q_heads, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((rows, keys, 2, 64), jnp.bfloat16)
    mask = masks.CAUSAL & masks.documents(IDS) if mask is None else mask
    return cudnn_packed.why_not(device, q, k, mask, alibi_slopes=slopes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.band(True, 9) & masks.documents(IDS)},
        {"mask": masks.documents(IDS)},
        {"q_heads": 8},
        {"rows": 2**13},
    ],
)
def test_can_run(options):
    assert why_not(**options) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": Device("gpu", (8, 0), "NVIDIA A100")}, "capability 9.0"),
        ({"device": Device("cpu")}, "capability 9.0"),
        ({"keys": 130}, "T = S"),
        ({"mask": masks.CAUSAL}, "segment ids"),
        ({"mask": masks.documents(IDS) & masks.positions(IDS, IDS)}, "no positions"),
        ({"slopes": 0}, "ALiBi"),
        ({"mask": masks.documents(IDS) & masks.window(9)}, "two-sided"),
        ({"mask": masks.documents(IDS) & Interval(after=3)}, "no other intervals"),
        ({"rows": 2**13 + 1}, "scratch"),
    ],
)
def test_says_why_not(options, reason):
    assert reason in why_not(**options)


def check_reference_by_documents(case):
    """Values element by element; gradients of a document by their norm."""
    actual = op_suite.value_and_grads(case.run, case.arrays, cotangents_of(case))
    in_fp32 = {n: x.astype(jnp.float32) if n in "qkv" else x for n, x in case.arrays.items()}
    expected = op_suite.value_and_grads(case.reference, in_fp32, cotangents_of(case))
    dtype = case.arrays["q"].dtype
    assert_close(actual[0], expected[0], dtype, case.terms)
    for name in "qkv":
        assert_norms_close(actual[1][name], expected[1][name], documents_of(case), dtype, case.terms, name)


def documents_of(case):
    """A mask [B, T] for each."""
    ids = np.asarray(case.arrays["ids"])
    rows = np.arange(len(ids))[:, None]
    return [(ids == i) & (rows == row) for row in range(len(ids)) for i in np.unique(ids[row][ids[row] > 0])]


def cotangents_of(case):
    q = case.arrays["q"]
    return jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), q.dtype)


GPU_ROWS = {
    "few": (8192, [[8192], [5000, 3000, 100]]),
    "many": (8192, [[150] * 54, [1025] * 7 + [3, 1, 200]]),
    "odd": (777, [[300, 400, 7], [1, 2, 500]]),
    "too_many": (1024, [[2] * 500, [7] * 100]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", GPU_ROWS)
def test_equals_the_reference(name, groups, window):
    length, rows = GPU_ROWS[name]
    ids = np.stack([row_of(lengths, length, 1) for lengths in rows])
    case = case_of(arrays_of(ids, 2, groups, 64, jnp.bfloat16), window=window)
    check_reference_by_documents(case)
    op_suite.check_poison(case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_ROWS)
def test_partial_attention_equals_the_reference(name):
    """Values, log-sum-exps, and gradients by documents' norms where other keys are seen too."""
    length, rows = GPU_ROWS[name]
    case = case_of(arrays_of(np.stack([row_of(n, length, 1) for n in rows]), 2, 1, 64, jnp.bfloat16))
    q, k, v, ids = case.arrays.values()
    do, mask = cotangents_of(case), masks.CAUSAL & masks.documents(ids)

    @jax.jit
    def run(q, k, v, do, ids):
        mask = masks.CAUSAL & masks.documents(ids)
        found = partial_attention(q, k, v, mask, implementation="cudnn")
        merged = found._replace(lse=found.lse + 0.7)
        return found, partial_attention_backward(q, k, v, merged, do, mask, implementation="cudnn")

    found, gradients = run(q, k, v, do, ids)
    o, lse = reference.attention_with_lse(q, k, v, mask)
    assert_close(found.o, o, q.dtype, case.terms)
    assert_close(found.lse.swapaxes(1, 2)[ids > 0], lse.swapaxes(1, 2)[ids > 0], q.dtype, case.terms)
    expected = jax.jit(reference.gradients_given_lse)(q, k, v, o, lse + 0.7, do, mask)
    for what, got, like in zip("qkv", gradients, expected, strict=True):
        assert_norms_close(got, like, documents_of(case), q.dtype, case.terms, what)


@pytest.mark.gpu
def test_both_directions_and_remat():
    ids = np.stack([row_of([700, 200, 90], 1024), row_of([1024], 1024)])
    case = case_of(arrays_of(ids, 4, 2, 128, jnp.float16), causal=False)
    check_reference_by_documents(case)
    op_suite.check_remat(case)


@pytest.mark.gpu
def test_long_rows_equal_xla():
    """Three classes of sizes, through the public function."""
    ids = np.stack([row_of([40000, 9000, 8000, 1000, 100, 1] + [50] * 100, 65600, 1)])
    a = arrays_of(ids, 2, 1, 64, jnp.bfloat16)

    def of(implementation):
        def run(x):
            mask = masks.band(True, 300) & masks.documents(x["ids"])
            return attention(x["q"], x["k"], x["v"], mask, implementation=implementation)

        return run

    case = OpCase(name="long", run=of("cudnn"), reference=of("xla"), arrays=a, terms=300)
    check_reference_by_documents(case)
