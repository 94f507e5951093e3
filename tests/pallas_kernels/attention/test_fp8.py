"""Attention in E4M3 against fp64 attention of the same rounded arrays, and what both say of their largest entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import (
    Fp8GradientScales,
    Fp8Scales,
    fp8_attention,
    fp8_attention_gradients,
)
from pallas_kernels.attention.fp8 import in_parts

E4M3 = jnp.float8_e4m3fn
NAMES = ("o", "dq", "dk", "dv")


def arrays(rows=2, length=128, heads=2):
    """Return q, k, v and do in E4M3 whose scales differ, and the scales, so that none can stand for another."""
    keys, shape = jax.random.split(jax.random.key(0), 4), (rows, length, heads, 128)
    q, k, v, do = (jax.random.normal(key, shape) for key in keys)
    scales = Fp8Scales(*(jnp.float32(s) for s in (64, 32, 16, 128)))
    over = Fp8GradientScales(*(jnp.float32(s) for s in (8, 256, 64, 32, 4)))
    rounded = [(x * s).astype(E4M3) for x, s in zip((q, k, v, do), (*scales[:3], over.o), strict=True)]
    return rounded, scales, over


def both(given, scales, over, **options):
    q, k, v, do = given
    out = fp8_attention(q, k, v, scales, **options)
    return out, fp8_attention_gradients(q, k, v, out.o, out.lse, do, scales, over, **options)


def exact(given, scales, over):
    """Attention in fp64 of the same rounded operands; nothing else is rounded."""
    wide = [np.asarray(x, np.float64) / float(s) for x, s in zip(given, (*scales[:3], over.o), strict=True)]
    q, k, v, do = wide
    scores = np.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    p = weights / total
    o = np.einsum("bhts,bshk->bthk", p, v)
    dp = np.einsum("bthk,bshk->bhts", do, v)
    ds = p * (dp - (do * o).sum(-1).transpose(0, 2, 1)[..., None]) * q.shape[-1] ** -0.5
    found = {"o": o, "dq": np.einsum("bhts,bshk->bthk", ds, k), "dk": np.einsum("bhts,bthk->bshk", ds, q)}
    return found | {"dv": np.einsum("bhts,bthk->bshk", p, do), "ds": ds, "lse": (top + np.log(total))[..., 0]}


def check(out, gradients, scales, over, wanted):
    """Roundings of weights, of ds, of o in the mean, and of the result: three bits each."""
    found = dict(zip(NAMES, (out.o, *gradients[:3]), strict=True))
    undo = dict(zip(NAMES, (scales.o, over.q, over.k, over.v), strict=True))
    for name, value in found.items():
        error = np.asarray(value, np.float64) / float(undo[name]) - wanted[name]
        assert np.linalg.norm(error) < 2.0**-4 * np.linalg.norm(wanted[name]), name
    largest = [np.abs(wanted[name]).max() for name in ("o", "ds", "dq", "dk", "dv")]
    np.testing.assert_allclose([out.largest, *gradients.largest], largest, rtol=2.0**-3)
    np.testing.assert_allclose(out.lse, wanted["lse"], rtol=2.0**-7, atol=2.0**-7)


def test_the_definition_is_attention_within_its_roundings():
    given, scales, over = arrays()
    out, gradients = both(given, scales, over)
    check(out, gradients, scales, over, exact(given, scales, over))


def test_rows_in_parts_are_rows_together():
    """Five rows of 20 heads are in parts of three."""
    (q, k, v, do), scales, over = arrays(rows=5, length=8, heads=20)
    out = fp8_attention(q, k, v, scales)
    given = (q, k, v, out.o, out.lse, do, scales, over)
    calls: list[int] = []

    def run(*part):
        calls.append(len(part[0]))
        return fp8_attention_gradients(*part)

    for part, whole in zip(in_parts(run, *given), fp8_attention_gradients(*given), strict=True):
        np.testing.assert_array_equal(np.asarray(part, np.float32), np.asarray(whole, np.float32))
    assert calls == [3, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("length", [128, 1024])
def test_cudnn_computes_the_definition(length):
    """All scales differ, so this fails too where XLA reads them in another order than `_compat` writes them."""
    given, scales, over = arrays(length=length)
    run = jax.jit(lambda *given: both(given, scales, over, implementation="cudnn"))
    out, gradients = run(*given)
    check(out, gradients, scales, over, exact(given, scales, over))


def test_other_dtypes_and_shapes_are_refused():
    (q, k, v, _), scales, _ = arrays(length=8)
    with pytest.raises(
        ValueError, match=r"must be float8_e4m3fn of one shape .*, got bfloat16\[2, 8, 2, 128\]"
    ):
        fp8_attention(q.astype(jnp.bfloat16), k, v, scales)
    with pytest.raises(ValueError, match=r"it needs a GPU of capability 9\.x"):
        fp8_attention(q, k, v, scales, implementation="cudnn")
