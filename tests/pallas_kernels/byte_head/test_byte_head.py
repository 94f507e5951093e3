"""The byte head: both losses against their definitions, in chunks of every kind, with nothing kept."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_kernels.byte_head import cross_entropy, entropy, explain, reference, xla
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close

B, T, D, V = 8, 13, 6, 20


def arrays(dtype: Any = jnp.float32, head_dtype: Any = None, **shape: int) -> dict[str, Any]:
    b, t, d, v = (shape.get(name, size) for name, size in zip("btdv", (B, T, D, V), strict=True))
    rng = np.random.default_rng(0)
    return {
        "x": jax.device_put(rng.standard_normal((b, t, d)).astype(dtype)),
        "head": jax.device_put(rng.standard_normal((d, v)).astype(head_dtype or dtype)),
        "targets": jax.device_put(rng.integers(0, v, (b, t)).astype(np.int32)),
    }


def _case(name: str, of: str, given: dict[str, Any], **options: Any) -> op_suite.OpCase:
    wanted = ("x", "head", "targets") if of == "cross_entropy" else ("x", "head")
    run, textbook = partial(getattr(xla, of), **options), getattr(reference, of)
    return op_suite.OpCase(
        name=f"{of}-{name}",
        run=lambda a: run(*[a[n] for n in wanted]),
        reference=lambda a: textbook(*[a[n] for n in wanted]),
        arrays={n: given[n] for n in wanted},
        shared=frozenset({"head"}),
        terms=D + V,
        grad_terms=B * T,
    )


CASES = [
    case
    for of in ("cross_entropy", "entropy")
    for case in (
        _case("one_chunk", of, arrays()),
        _case("ragged_chunks", of, arrays(), tokens=4 * B),
        _case("a_token_a_chunk", of, arrays(t=3), tokens=1),
        _case("bfloat16", of, arrays(jnp.bfloat16), tokens=4 * B),
        _case("wide_head", of, arrays(jnp.bfloat16, jnp.float32), tokens=4 * B),
    )
]


@pytest.mark.slow(days=28, group="properties of kernels", every="*-reference")
@pytest.mark.parametrize("check", [name for name in op_suite.CHECKS if name != "poison"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


@pytest.mark.slow(days=28, group="costly")
def test_any_leading_axes() -> None:
    a = arrays()
    x, targets = a["x"].reshape(2, 4, T, D), a["targets"].reshape(2, 4, T)
    for shape in ((2, 4, T), (B * T,)):
        got = cross_entropy(x.reshape(*shape, D), a["head"], targets.reshape(shape))
        assert_close(got.reshape(B, T), reference.cross_entropy(a["x"], a["head"], a["targets"]), n=D + V)
        got = entropy(x.reshape(*shape, D), a["head"])
        assert_close(got.reshape(B, T), reference.entropy(a["x"], a["head"]), n=D + V)


def test_known_values() -> None:
    """Equal logits: log V nats each. One logit far above the rest: certain, even where exp() would overflow."""
    x, targets = jnp.ones((1, 2, D)), jnp.array([[0, 1]], jnp.int32)
    flat = jnp.zeros((D, V))
    np.testing.assert_allclose(cross_entropy(x, flat, targets), np.log(V), rtol=1e-6)
    np.testing.assert_allclose(entropy(x, flat), np.log(V), rtol=1e-6)
    sure = flat.at[:, 0].set(1000.0)
    np.testing.assert_allclose(cross_entropy(x, sure, targets), [[0, 1000.0 * D]], rtol=1e-6)
    np.testing.assert_array_equal(entropy(x, sure), 0)
    assert all(np.isfinite(g).all() for g in jax.grad(lambda x, h: entropy(x, h).sum(), (0, 1))(x, sure))


def _largest(jaxpr: Any) -> int:
    """Elements of the largest array that a program makes, its loops' bodies included."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [_largest(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return max(sizes + inner, default=0)


@pytest.mark.parametrize("of", ["cross_entropy", "entropy"])
def test_logits_of_a_chunk_alone_exist(of: str) -> None:
    a = arrays(b=2, t=64, v=60)
    tokens = 16

    def backward(run: Any) -> int:
        rest = (a["targets"],) if of == "cross_entropy" else ()

        def both(x: Any, head: Any, g: Any) -> Any:
            out, back = jax.vjp(lambda x, head: run(x, head, *rest), x, head)
            return out, back(g)

        return _largest(jax.make_jaxpr(both)(a["x"], a["head"], jnp.ones((2, 64))).jaxpr)

    assert backward(partial(getattr(xla, of), tokens=tokens)) == max(tokens * 60, 2 * 64 * D)
    assert backward(getattr(reference, of)) == 2 * 64 * 60


def test_the_gradient_of_a_wide_head_is_summed_wide() -> None:
    """In bf16 a sum of many small terms stands still long before 4096 of them."""
    x, head = jnp.full((1, 4096, 1), 2.0**-4, jnp.bfloat16), jnp.zeros((1, 2))
    targets = jnp.zeros((1, 4096), jnp.int32)
    got = jax.grad(lambda head: xla.cross_entropy(x, head, targets, tokens=64).sum())(head)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, [[-128.0, 128.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": jnp.ones((D + 1, V))}, r"expected x \[..., T, D\] and head \[D, V\]"),
        ({"x": jnp.ones((B, T, D), jnp.int32)}, "floating point"),
        ({"x": jnp.ones((D,))}, "expected x"),
        ({"targets": jnp.ones((B, T + 1), jnp.int32)}, "one integer a byte"),
        ({"targets": jnp.ones((B, T))}, "got float32"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{**arrays(), **change})


def test_explain_names_the_choice() -> None:
    assert explain("cross_entropy").startswith("byte_head.cross_entropy: xla on ")
    assert explain("entropy").startswith("byte_head.entropy: xla on ")
