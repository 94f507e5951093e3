"""Products of one token: each implementation against the definition, by what stands before them."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.attention import EMPTY_LSE
from pallas_kernels.token_product import api, reference, token_product, triton_gpu
from pallas_kernels.token_product.bench import plan
from pallas_kernels.token_product.shapes import SHAPES, TokenShape
from pallas_kernels.token_product.split import TILE, Tile, cut_rows, split_rows
from tests.tolerances import assert_close

SMALL = {
    "several": TokenShape("several", 300, (40, 64, 8), normed=True),
    "summed": TokenShape("summed", 256, (128,), parts=3, normed=True),
    "gated": TokenShape("gated", 600, (72,), parts=2, gated=True),
    "plain": TokenShape("plain", 40, (24,)),
    "merged": TokenShape("merged", 384, (72,), parts=5, heads=3),
}


INTERPRETED = partial(triton_gpu.token_product, interpret=True)
DEFINITION = jax.jit(reference.token_product, static_argnames="leaves_norm")


@cache
def arrays(shape: TokenShape) -> tuple[Any, ...]:
    return plan(shape).truth.args


def in_f64(x: Any, kernels: Any, parts: Any, scale: Any, lse: Any, squares: Any) -> Any:
    wide = [None if a is None else np.asarray(a, np.float64) for a in (x, parts, scale, lse, squares)]
    x, parts, scale, lse, squares = wide
    token = 0 if parts is None else parts.sum(0)
    if lse is not None:
        shares = np.exp(lse) / np.exp(lse).sum(0)
        token = (parts.reshape(*lse.shape, -1) * shares[..., None]).sum(0).reshape(-1)
    elif x is None:
        gate, up = np.split(token / np.sqrt(squares.sum() + 1e-6), 2)
        token = gate / (1 + np.exp(-gate)) * up
    else:
        token = x + token
    normed = token if scale is None else token / np.sqrt((token**2).mean() + 1e-6) * scale
    return token, normed @ np.concatenate([np.asarray(k, np.float64) for k in kernels], 1)


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_implementations_compute_the_definition(shape: TokenShape) -> None:
    given = arrays(shape)
    exact = in_f64(*given)
    for run in (INTERPRETED, DEFINITION):
        token, parts = run(*given)
        assert parts.shape == (split_rows(shape.dim, shape.widths).parts, sum(shape.widths))
        # Steps are rounded: the product before, the gate, the token, the norm
        limits = {"n": 4 * shape.dim, "dtype": jnp.bfloat16}
        assert_close(np.asarray(parts).sum(0), exact[1].astype(np.float32), **limits)
        assert (token is None) == (shape.gated or shape.heads > 0)
        if token is not None:
            assert_close(token, exact[0].astype(np.float32), **limits)


@pytest.mark.parametrize("run", [INTERPRETED, DEFINITION], ids=["triton", "reference"])
def test_parts_that_saw_nothing_count_nothing(run: Any) -> None:
    _, kernels, parts, _, lse, _ = arrays(SMALL["merged"])
    some = run(None, kernels, parts, None, lse.at[2].set(EMPTY_LSE))[1]
    rest = run(None, kernels, jnp.delete(parts, 2, 0), None, jnp.delete(lse, 2, 0))[1]
    assert_close(some, np.asarray(rest), n=SMALL["merged"].dim, dtype=jnp.bfloat16)
    none = run(None, kernels, parts, None, jnp.full_like(lse, EMPTY_LSE))[1]
    assert (np.asarray(none) == 0).all()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_kernel_on_a_gpu_computes_each_part_of_real_shapes(shape: TokenShape) -> None:
    given = arrays(shape)
    found, known = (
        jax.jit(partial(run, leaves_norm=shape.leaves_norm))(*given)
        for run in (triton_gpu.token_product, reference.token_product)
    )
    assert_close(found[1], np.asarray(known[1]), n=4 * shape.dim, dtype=jnp.bfloat16)
    assert (found[0] is None) == (shape.gated or shape.heads > 0)
    if found[0] is not None:
        assert_close(found[0], np.asarray(known[0]), n=4 * shape.dim)
    for squares, exact in zip(found[2:], known[2:], strict=True):
        assert_close(squares, np.asarray(exact), n=shape.dim)


@pytest.mark.parametrize("name", ["several", "gated", "merged"])
def test_each_part_is_that_of_the_definition(name: str) -> None:
    given = arrays(SMALL[name])
    found = triton_gpu.token_product(*given, interpret=True)[1]
    known = DEFINITION(*given)[1]
    assert len(found) > 1
    assert_close(found, np.asarray(known), n=4 * SMALL[name].dim, dtype=jnp.bfloat16)


@pytest.mark.slow(days=28, group="properties of kernels", every="several-2")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", ["several", "summed", "gated", "merged"])
def test_loads_of_several_turns_add_up(name: str, parts: int) -> None:
    """Loads are made three at a time, the last of which may lie behind the rows."""
    given, tile = arrays(SMALL[name]), Tile(16, 32, 3)
    token, found = INTERPRETED(*given, chosen=(tile, cut_rows(SMALL[name].dim, tile, parts)))
    assert len(found) == parts
    exact, limits = in_f64(*given), {"n": 4 * SMALL[name].dim, "dtype": jnp.bfloat16}
    assert_close(np.asarray(found).sum(0), exact[1].astype(np.float32), **limits)
    if token is not None:
        assert_close(token, exact[0].astype(np.float32), **limits)


def test_a_norm_may_be_left_to_the_next_product() -> None:
    x, kernels, parts, scale, *_ = arrays(SMALL["summed"])
    down = jax.random.normal(jax.random.key(2), (64, 40), jnp.bfloat16)
    for run in (INTERPRETED, DEFINITION):
        exact = run(None, (down,), run(x, kernels, parts, scale)[1])[1]
        token, hidden, squares = run(x, kernels, parts, scale, leaves_norm=True)
        assert squares.shape == hidden.shape[:1]
        assert_close(squares.sum(), np.mean(np.asarray(token, np.float32) ** 2), n=256)
        found = run(None, (down,), hidden, None, None, squares)[1]
        # Another order of fp32 sums may round a half of the gate the other way
        assert_close(found, np.asarray(exact), n=4 * 64, dtype=jnp.bfloat16)


def test_rows_are_split_into_whole_tiles_that_cover_them() -> None:
    for dim, widths in ((768, (768,)), (2752, (1024,)), (5504, (2048,)), (8, (8,))):
        parts, rows = split_rows(dim, widths)
        assert rows % TILE.rows == 0
        assert (parts - 1) * rows < dim <= parts * rows


def test_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gpu, "token_product", INTERPRETED)
    x, kernels, parts, scale, *_ = arrays(SMALL["summed"])

    def of(call: Any) -> Any:
        total = lambda x, scale: jnp.sum(call(x, kernels, parts, scale)[1])  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))(x, scale)

    ours = of(lambda *given: api._triton(*given, epsilon=1e-6))
    for found, exact in zip(ours, of(reference.token_product), strict=True):
        assert_close(found, np.asarray(exact, np.float32), n=1024, dtype=jnp.bfloat16)


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
@pytest.mark.parametrize("name", ["summed", "gated", "merged"])
def test_the_benchmark_passes_its_gate(name: str) -> None:
    assert set(check(plan(SMALL[name]), jax.random.key(0))) == {"plain"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": None}, "pass x, parts, or both"),
        ({"x": None, "parts": jnp.zeros((1, 4))}, r"expected parts \[S, 8\], got \[1, 4\]"),
        ({"parts": jnp.zeros((1, 3))}, r"expected parts \[S, 4\], got \[1, 3\]"),
        ({"scale": jnp.zeros(3)}, r"expected scale \[4\], got \[3\]"),
        (
            {"lse": jnp.zeros((1, 2)), "parts": jnp.zeros((1, 4))},
            r"expected lse \[S, H\] with parts \[S, 4\] and no x",
        ),
        ({"x": jnp.zeros(3)}, r"expected x \[4\] for kernels"),
        ({"kernels": [jnp.zeros((4, 2)), jnp.zeros((5, 2))]}, r"expected kernels \[D, N\] of one D"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_product(**{"x": jnp.zeros(4), "kernels": [jnp.zeros((4, 2))]} | options)
