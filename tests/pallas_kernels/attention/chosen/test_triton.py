"""The Triton kernels of chosen blocks: the order of tokens, interpreted where triton is installed, run on a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Chosen, attention, masks, triton_gpu
from pallas_kernels.attention.chosen import triton_gpu as chosen
from tests.pallas_kernels.attention.test_triton import Call
from tests.pallas_kernels.attention.triton_interpreter import interpreting


def lists(tokens: int, blocks: int, *, groups: int = 2, count: int = 3, block_q: int = 1) -> Any:
    """Return drawn lists [2, groups, rows, count]: some name a block twice, or none; the first block is popular."""
    rng = np.random.default_rng(tokens)
    found = rng.integers(-1, blocks, (2, groups, -(-tokens // block_q), count))
    found[:, :, ::2, 0] = 0
    return jnp.asarray(found, jnp.int32)


def calls(size: int, dtype: Any, width: int) -> tuple[Call, ...]:
    """Return calls in blocks of `size`."""
    tokens, given = 6 * size, {"dtype": dtype, "width": width}
    return (
        Call(name="causal", mask=masks.CAUSAL & Chosen(lists(tokens, 6), size), tokens=tokens, **given),
        Call(
            name="one list",
            mask=masks.window(2 * size) & Chosen(lists(tokens, 6, groups=1), size),
            tokens=tokens,
            groups=1,
            **given,
        ),
        Call(
            name="documents",
            mask=masks.FULL & Chosen(lists(tokens, 6, groups=1, block_q=size // 2), size, size // 2),
            tokens=tokens,
            lengths=((size + 3, 2 * size, size), (5, 3 * size - 1)),
            **given,
        ),
        Call(
            name="other keys",
            mask=masks.FULL & Chosen(lists(tokens, 4, groups=4, count=1), size),
            tokens=tokens,
            keys=3 * size + 5,
            groups=4,
            **given,
        ),
    )


def test_tokens_are_sorted_by_block() -> None:
    blocks = np.asarray([[[[1, 1], [0, 2], [-1, 1]], [[2, 9], [2, -1], [0, 2]]]], np.int32)
    found = jax.jit(chosen.sort_tokens, static_argnums=1)(blocks, 3)
    np.testing.assert_array_equal(found.there[0, 0], [[True, False], [True, True], [False, True]])
    np.testing.assert_array_equal(found.there[0, 1], [[True, False], [True, False], [True, True]])
    np.testing.assert_array_equal(found.starts[0], [[0, 1, 3, 4], [0, 1, 1, 4]])
    np.testing.assert_array_equal(found.order[0], [[2, 0, 5, 3, 1, 4], [4, 0, 2, 5, 1, 3]])
    np.testing.assert_array_equal(found.rows[0], [[1, 0, 2], [2, 0, 1]])


def test_rows_of_any_length_are_cut_into_strips() -> None:
    x = jnp.arange(14).reshape(2, 7)
    strips = chosen.count_strips(7000, 7, 2000)
    assert strips == 4
    cut = chosen.cut_strips(strips, x, fill=-1)
    np.testing.assert_array_equal(cut[:, 1], [[7, 8], [9, 10], [11, 12], [13, -1]])
    np.testing.assert_array_equal(chosen.join_strips(cut, 7), x)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(chosen, name, chosen.Tile(16, 4, 2, 2))
    with interpreting(monkeypatch, "pallas_kernels.attention.chosen.triton_kernel"):
        yield


SMALL = calls(16, jnp.float16, 16)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels", every="causal")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("call", SMALL, ids=str)
def test_interpreted(call: Call) -> None:
    call.check(triton_gpu.attention)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("tokens", [96, 93])
def test_strips_of_queries_are_the_whole(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any length: the last strip may be short."""
    monkeypatch.setattr(chosen, "ROOM", 1 << 16)
    rule = Chosen(lists(tokens, 6), 16)
    call = replace(SMALL[0], mask=masks.CAUSAL & rule, tokens=tokens)
    q, *_ = call.arrays()
    assert chosen._count_strips(q, rule.lists) == 2
    call.check(triton_gpu.attention)


def test_says_which_lists_it_takes() -> None:
    q, k = (jax.ShapeDtypeStruct((2, 200, heads, 64), jnp.bfloat16) for heads in (12, 2))
    mask = masks.CAUSAL & Chosen(lists(200, 4), 64)
    places = masks.positions(*2 * [jnp.zeros((2, 200), jnp.int32)])
    assert "a power of 2 of query heads up to 64 share a key head, not 6" in str(chosen.why_not(q, k, mask))
    assert chosen.why_not(k, k, mask) is None
    assert "joined to no other rule" in str(chosen.why_not(k, k, mask & places))


LARGE = calls(64, jnp.bfloat16, 128)
RUN = partial(attention, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("call", [*LARGE, replace(LARGE[0], heads=16, width=64)], ids=str)
def test_on_a_gpu(call: Call) -> None:
    """Values and gradients, which repeat bit for bit."""
    call.check(RUN)
    arrays, run = call.arrays(), call.passes(RUN)
    for first, again in zip(run(arrays), run(arrays), strict=True):
        np.testing.assert_array_equal(first, again)
