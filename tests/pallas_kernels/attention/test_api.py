"""What the public function refuses, and what it promises of every implementation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, attention_with_lse, masks
from pallas_kernels.runtime import reference_ops
from tests.pallas_kernels.attention.cases import Call
from tests.tolerances import assert_close

CALL = Call(name="call", queries=6, heads=4, groups=2)


ONES = jnp.ones((2, 6), jnp.int32)


def _call(mask=masks.CAUSAL, **changes):
    arrays = {**CALL.arrays(), "implementation": "xla", **changes}
    return attention(**arrays, mask=mask() if callable(mask) else mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 6, 8))}, r"expected q \[B, T, H, K\]"),
        ({"q": jnp.zeros((2, 6, 3, 8))}, "H = 3 divide by G = 2"),
        ({"q": jnp.zeros((2, 6, 4, 8), jnp.bfloat16)}, "one dtype"),
        ({"mask": lambda: masks.window(0)}, "window must be at least 1"),
        ({"mask": masks.documents(ONES[:, :5], ONES)}, r"segment ids .* must be \(2, 6\)"),
        ({"mask": masks.positions(ONES, ONES[:, :1])}, r"positions .* must be \(2, 6\)"),
        ({"mask": masks.key_lengths(ONES[0])}, r"key_lengths must have shape \(2,\)"),
        ({"mask": masks.query_lengths(ONES[0])}, r"query_lengths must have shape \(2,\)"),
        ({"mask": lambda: masks.documents(ONES) & masks.documents(ONES)}, "two masks with segment ids"),
        ({"alibi_slopes": jnp.ones((2,))}, "one slope a head"),
        ({"q": jnp.zeros((2, 1, 4, 8))}, "add masks.positions"),
        ({"q": jnp.zeros((2, 1, 4, 8)), "mask": masks.window(4)}, "add masks.positions"),
        ({"implementation": "fast"}, "unknown implementation 'fast'"),
        ({"implementation": "cudnn"}, "needs an NVIDIA GPU"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_query_without_keys_gives_zero(implementation):
    arrays = CALL.arrays()
    segments = jnp.asarray([[1, 1, 0, -1, 2, 2]] * 2, jnp.int32)
    attend = partial(attention, implementation=implementation)
    o = jax.jit(attend)(**arrays, mask=masks.CAUSAL & masks.documents(segments))
    assert not np.asarray(o)[:, 2:4].any()
    assert np.asarray(o)[:, [0, 1, 4, 5]].all()


def test_documents_packed_are_documents_apart():
    arrays = CALL.arrays()
    segments = jnp.asarray([[7, 7, 3, 3, 3, 3]] * 2, jnp.int32)
    attend = jax.jit(attention)
    packed = attend(**arrays, mask=masks.CAUSAL & masks.documents(segments))
    for own in (slice(0, 2), slice(2, 6)):
        apart = {n: x[:, own] for n, x in arrays.items()}
        assert_close(packed[:, own], attend(**apart, mask=masks.CAUSAL), n=6)


def test_dtypes_of_the_results():
    arrays = {n: x.astype(jnp.bfloat16) for n, x in CALL.arrays().items()}
    assert jax.eval_shape(partial(attention, mask=masks.CAUSAL), **arrays).dtype == jnp.bfloat16
    o, lse = jax.eval_shape(partial(attention_with_lse, mask=masks.CAUSAL), **arrays)
    assert (o.dtype, lse.dtype, lse.shape) == (jnp.float32, jnp.float32, (2, 4, 6))


def test_the_log_sum_exp_has_forward_derivatives_inside_reference_ops():
    arrays = CALL.arrays()
    attend = partial(attention_with_lse, mask=masks.CAUSAL)
    with reference_ops():
        both, tangents = jax.jit(lambda q: jax.jvp(lambda q: attend(**arrays | {"q": q}), (q,), (q,)))(
            arrays["q"]
        )
    for found, expected in zip(both, jax.jit(attend)(**arrays), strict=True):
        assert_close(found, expected, n=CALL.queries)
    # The first query sees one key, whose share stays 1 and whose score is linear in the query.
    assert_close(tangents[1][..., 0], both[1][..., 0], n=arrays["q"].shape[-1])
    np.testing.assert_array_equal(np.asarray(tangents[0][:, 0]), 0)
