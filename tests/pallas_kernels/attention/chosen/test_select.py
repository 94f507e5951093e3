"""The choice of blocks: against a loop, the Triton kernels interpreted where triton is installed, and on a GPU."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _jax_triton
from pallas_kernels.attention.chosen import select, select_triton
from pallas_kernels.attention.chosen.places import Places
from pallas_kernels.attention.chosen.select import choose_blocks
from tests.pallas_kernels.attention.test_triton import HOPPER
from tests.pallas_kernels.attention.triton_interpreter import interpreting


def drawn(tokens: int, blocks: int, width: int, dtype: Any) -> tuple[Any, ...]:
    """Return queries of 4 heads, keys of 2, and places in rows: of two documents, and of one with a gap of padding."""
    keys = jax.random.split(jax.random.key(tokens), 2)
    q = 3 * jax.random.normal(keys[0], (2, tokens, 4, width), dtype)
    k = jax.random.normal(keys[1], (2, blocks, 2, width), dtype)
    half, size = tokens // 2, tokens // blocks
    ids = np.ones((2, tokens), np.int32)
    ids[0, half:], ids[1, -3:] = 2, 0
    times = np.broadcast_to(np.arange(tokens), ids.shape).copy()
    times[0, half:] -= half
    block_ids = np.ones((2, blocks), np.int32)
    block_ids[0, blocks // 2 :], block_ids[1, 2] = 2, 0
    numbers = np.broadcast_to(np.arange(blocks), block_ids.shape).copy()
    numbers[0, blocks // 2 :] -= blocks // 2
    places = [jnp.asarray(x, jnp.int32) for x in (ids, times // size, block_ids, numbers)]
    return q, k, Places(*places[:2]), Places(*places[2:])


def shares(q: Any, k: Any, asks: Places, blocks: Places) -> np.ndarray:
    """Return shares summed over heads in float64, [B, T, G, M]; -1 where a query may not choose."""
    q, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k))
    q = q.reshape(*q.shape[:2], 2, 2, -1)
    scores = np.einsum("btgrk,bmgk->btgrm", q, k) / np.sqrt(q.shape[-1])
    seen = np.asarray(asks.see(blocks))[:, :, None, None]
    p = np.where(seen, np.exp(scores), 0)
    p = (p / np.maximum(p.sum(-1, keepdims=True), 1e-30)).sum(3)
    return np.where(seen[:, :, :, 0], p, -1)


def check(found: Any, all_shares: np.ndarray, count: int, near: float) -> None:
    """Compare the shares of what is chosen with the largest ones: equal shares may be chosen for each other."""
    found = np.asarray(found)
    expected = -np.sort(-all_shares, -1)[..., :count]
    got = np.where(found >= 0, np.take_along_axis(all_shares, np.maximum(found, 0), -1), -1)
    np.testing.assert_allclose(got, expected, atol=near)
    for one in found.reshape(-1, count):
        assert len(set(one[one >= 0])) == (one >= 0).sum()


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_equals_the_loop(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "STRIP", 16)
    given = drawn(40, 10, 8, jnp.float32)
    choose = jax.jit(lambda *x: choose_blocks(*x, count=3, implementation=name))
    check(choose(*given), shares(*given), 3, 1e-6)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"ROWS": 16, "COLUMNS": 16, "HELD": 128}.items():
        monkeypatch.setattr(select_triton, name, value)
    with interpreting(monkeypatch, "pallas_kernels.attention.chosen.triton_kernel"):
        yield


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("room", "tokens"), [(1 << 31, 72), (1 << 12, 73)], ids=["whole", "strips"])
def test_interpreted(room: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_triton, "ROOM", room)
    given = drawn(tokens, 18, 16, jnp.float16)
    check(jax.jit(lambda *x: select_triton.choose_blocks(*x, count=4))(*given), shares(*given), 4, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "blocks", "width"), [(1000, 125, 64), (4096, 1024, 128)])
def test_on_a_gpu(tokens: int, blocks: int, width: int) -> None:
    given = drawn(tokens, blocks, width, jnp.bfloat16)
    found = jax.jit(lambda *x: choose_blocks(*x, count=16, implementation="triton"))(*given)
    check(found, shares(*given), 16, 1e-3)


@pytest.mark.parametrize(("heads", "count"), [(1, 2), (3, 2), (4, 0)])
def test_heads_and_counts_that_do_not_fit_are_refused(heads: int, count: int) -> None:
    q, *others = drawn(8, 4, 8, jnp.float32)
    with pytest.raises(ValueError, match=f"H = {heads} query heads.*G = 2 .*count = {count}"):
        choose_blocks(q[:, :, :heads], *others, count=count)


def test_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)
    q, k, asks, blocks = drawn(64, 8, 64, jnp.bfloat16)
    why_not = select.TABLE[0].why_not
    assert why_not(HOPPER, q, k, asks, blocks, count=2) is None
    assert "not float32 and float32" in str(why_not(HOPPER, *drawn(64, 8, 64, jnp.float32), count=2))
    assert "not 2 heads of 32" in str(why_not(HOPPER, *drawn(64, 8, 32, jnp.bfloat16), count=2))
    wide = jax.ShapeDtypeStruct((2, (1 << 14) + 1, 2, 64), jnp.bfloat16)
    assert "16385" in str(why_not(HOPPER, q, wide, asks, blocks, count=2))
