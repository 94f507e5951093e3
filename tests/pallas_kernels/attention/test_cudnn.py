"""cuDNN: what it is picked for, that it lowers for CUDA, and on a GPU that it equals the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from pallas_kernels import _jax_triton
from pallas_kernels._dispatch import Device
from pallas_kernels.attention import attention, cudnn, explain, masks
from pallas_kernels.attention.rules import Interval
from pallas_kernels.attention.shapes import SHAPES
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.attention.cases import Call

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
VOLTA = Device("gpu", (7, 0), "NVIDIA V100")

SIZES = {"heads": 4, "groups": 2, "head_dim": 64, "dtype": jnp.bfloat16}
CALLS = (
    Call(name="causal", queries=256, **SIZES),
    Call(name="bidirectional_odd", queries=201, causal=False, **SIZES),
    Call(name="window", queries=300, window=64, **SIZES),
    Call(name="lengths", queries=256, causal=False, lengths=True, **SIZES),
    Call(name="lengths_causal_window", queries=256, lengths=True, window=50, **SIZES),
    Call(name="cross_lengths", queries=64, keys=256, causal=False, lengths=True, **SIZES),
    Call(name="segments", queries=256, segments=True, **SIZES),
    Call(name="segments_odd_window", queries=201, segments=True, window=50, **SIZES),
    Call(name="window_both_sides", queries=128, causal=False, window=20, **SIZES),
    Call(name="decode", queries=1, keys=256, positions=True, lengths=True, **SIZES),
    Call(name="alibi", queries=128, alibi=True, **SIZES),
    Call(name="wide_heads", queries=128, heads=2, head_dim=128, dtype=jnp.float16),
)


@pytest.fixture
def cuda_lowering(monkeypatch):
    """Lets the CPU build of JAX lower cuDNN calls: it only misses the version of the library."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_lowers_for_cuda(call, cuda_lowering):
    arrays = call.arrays()
    mask, slopes = call.mask(arrays), arrays.get("alibi_slopes")
    qkv = [arrays[name] for name in "qkv"]
    assert cudnn.why_not(HOPPER, *qkv, mask, alibi_slopes=slopes) is None

    def gradients(q, k, v):
        o, vjp = jax.vjp(lambda *a: cudnn.attention(*a, mask, alibi_slopes=slopes), q, k, v)
        return vjp(o)

    text = jax.jit(gradients).trace(*qkv).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in text
    assert "SoftmaxBackward" in text


def test_the_bias_of_hidden_keys_is_finite(monkeypatch):
    """JAX adds the mask to it as a number, and fp16 ends at 65,504."""
    biases = []
    record = lambda q, k, v, *, bias, **options: (biases.append(bias), q)[1]  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    x, places = jnp.ones((1, 2, 1, 8), jnp.float16), jnp.asarray([[0, jnp.iinfo(jnp.int32).max]])
    mask = masks.CAUSAL & masks.positions(jnp.asarray([[0, 1]]), places)
    cudnn.attention(x, x, x, mask, alibi_slopes=jnp.ones(1))
    assert biases[0].tolist() == [[[[0, 0], [-1, 0]]]]


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_equals_the_reference(call):
    case = call.case("cudnn")
    op_suite.check_reference(case)
    op_suite.check_poison(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.name in {"causal", "lengths", "window"}], ids=str
)
def test_vmap_and_remat(call):
    op_suite.check_vmap(call.case("cudnn"))
    op_suite.check_remat(call.case("cudnn"))


def _explain(device, queries=8192, keys=None, head_dim=64, dtype=jnp.bfloat16, alibi=False, **options):
    keys = keys or queries
    q = jax.ShapeDtypeStruct((1, queries, 4, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, keys, 4, head_dim), dtype)
    here, there, row = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, queries), (1, keys), (1,)))
    marks = {
        "window": lambda: masks.window(options["window"]),
        "segments": lambda: masks.documents(here),
        "positions": lambda: masks.positions(here, there),
        "lengths": lambda: masks.token_lengths(row),
    }
    mask = masks.CAUSAL
    for name in options:
        mask &= marks[name]()
    return explain(q, k, mask, alibi=alibi, device=device)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": VOLTA}, "compute capability 8.0, this GPU has 7.0"),
        ({"device": Device("gpu", (8, 0), "NVIDIA A100"), "head_dim": 192}, "at most 128, not 192"),
        ({"device": HOPPER, "head_dim": 60}, "multiple of 8"),
        ({"device": HOPPER, "dtype": jnp.float32}, "not float32"),
        ({"device": HOPPER, "segments": True, "positions": True}, "array this mask is too large"),
        ({"device": HOPPER, "segments": True, "positions": True}, "have no positions"),
        ({"device": Device("gpu", (8, 0), "NVIDIA A100"), "segments": True}, "need compute capability 9.0"),
        ({"device": Device("tpu", None, "TPU v5")}, "needs an NVIDIA GPU, this is tpu"),
        ({"device": Device("cpu")}, "this is cpu"),
    ],
)
def test_explains_why_not(options, reason, monkeypatch):
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: None)
    text = _explain(**options)
    assert text.startswith("attention: xla on")
    assert reason in text


@pytest.mark.parametrize("interval", [Interval(after=3), Interval(after=-1), Interval(before=-2, after=0)])
def test_kernels_are_not_asked_for_intervals_that_they_cannot_say(interval: Interval) -> None:
    x = jax.ShapeDtypeStruct((1, 8192, 4, 64), jnp.bfloat16)
    mask = masks.FULL & interval
    assert "as an array this mask is too large" in cudnn.why_not(HOPPER, x, x, x, mask)
    assert cudnn.why_not_partial(HOPPER, x, x, x, mask) is not None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 512, "lengths": True},
        {"head_dim": 256},
        {"segments": True, "queries": 4096},
        {"segments": True, "lengths": True, "window": 512},
        {"positions": True, "queries": 1, "keys": 65536},
        {"alibi": True, "queries": 2048},
    ],
)
def test_picks_cudnn_on_hopper(options, monkeypatch):
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: None)
    assert _explain(HOPPER, **options) == "attention: cudnn on NVIDIA H200"


def test_packed_rows_under_a_short_window_run_faster_by_triton(monkeypatch):
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    assert "attention: triton on NVIDIA H200" in _explain(HOPPER, segments=True, window=512)
    for others in ({"window": 1024}, {"window": 512, "head_dim": 128}, {"window": 512, "queries": 4096}, {}):
        assert "attention: cudnn on NVIDIA H200" in _explain(HOPPER, segments=True, **others)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_real_shapes_run_on_cudnn(shape):
    q = jax.ShapeDtypeStruct((shape.batch, shape.tokens, shape.heads, shape.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((shape.batch, shape.tokens, shape.groups, shape.head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if shape.documents > 1 else None
    mask = masks.band(shape.causal, shape.window) & masks.documents(ids)
    assert "cudnn on" in explain(q, k, mask, device=HOPPER)


def test_default_on_this_machine_runs():
    call = Call(name="default", queries=8)
    assert jax.jit(partial(attention, mask=masks.CAUSAL))(**call.arrays()).shape == (2, 8, 2, 8)
