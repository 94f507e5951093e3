"""Attention to the prefixes of a cache: its kernel interpreted and on a GPU, what it reads, and what it refuses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _hopper
from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import EMPTY_LSE, prefix_attention, prefix_why, triton_prefix
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
SMALL = (2, 1, 2, 2, 64, 300, [[0], [257]])
"""Rows, tokens, heads, key heads, their size, slots, and counts."""
DRAFTED = (2, 3, 8, 2, 32, 1000, [[5, 6, 0], [999, 1000, 5000]])
LONG = (3, 1, 4, 1, 128, 70_000, [[70_000], [1], [9000]])
MANY = (2, 16, 8, 2, 64, 4096, [[4000] * 16, [64] * 16])


def drawn(case: tuple[Any, ...], dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    """Return arguments whose cache has holes; its dtype is `dtype`."""
    rows, tokens, heads, groups, width, slots, counts = case
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((rows, tokens, heads, width)), jnp.bfloat16)
    k, v = (jnp.asarray(rng.standard_normal((rows, slots, groups, width)), dtype) for _ in "kv")
    times = np.where(rng.random((rows, slots)) < 0.8, np.arange(slots), -1)
    return q, k, v, jnp.asarray(counts, jnp.int32), jnp.asarray(times, jnp.int32)


def check(case: tuple[Any, ...], run: Any, dtype: Any = jnp.bfloat16) -> None:
    arrays = drawn(case, dtype)
    expected, (o, lse) = jax.jit(partial(prefix_attention, implementation="reference"))(*arrays), run(*arrays)
    some = np.asarray(expected.lse) > EMPTY_LSE
    assert_close(o, expected.o, jnp.bfloat16, n=case[5])
    assert_close(np.where(some, lse, 0), np.where(some, expected.lse, 0), jnp.bfloat16, n=case[4])
    assert (np.asarray(lse)[~some] == EMPTY_LSE).all()
    if not some.all():
        assert (np.asarray(o).swapaxes(1, 2)[~some] == 0).all()


INTERPRETED = partial(triton_prefix.prefix_attention, interpret=True)


@pytest.mark.slow(days=28, group="costly")
def test_interpreted() -> None:
    check(SMALL, INTERPRETED)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_prefix")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_drafted_queries_share_key_heads(dtype: Any) -> None:
    check(DRAFTED, INTERPRETED, dtype)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_prefix")
def test_interpreted_under_vmap() -> None:
    stacked = [jnp.stack([x, x[::-1]]) for x in drawn(SMALL)]
    found = jax.vmap(INTERPRETED)(*stacked)
    for i in range(2):
        for x, y in zip(found, INTERPRETED(*(x[i] for x in stacked)), strict=True):
            np.testing.assert_array_equal(x[i], y)


@pytest.mark.slow(days=28, group="costly", turn="pallas_kernels/attention/test_prefix")
def test_gradients_are_those_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *marks = drawn(SMALL, jnp.float32)

    def gradients(name: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            o, lse = prefix_attention(q, k, v, *marks, implementation=name)
            return jnp.sum(o**2) + jnp.sum(jnp.where(lse > EMPTY_LSE, lse, 0))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    expected = gradients("xla")
    monkeypatch.setattr(triton_prefix, "prefix_attention", INTERPRETED)
    with compiling_for(HOPPER):
        found = gradients("triton")
    for got, want in zip(found, expected, strict=True):
        assert_close(got, want, jnp.bfloat16, n=SMALL[5])


@pytest.mark.parametrize("case", [SMALL, DRAFTED], ids=["small", "drafted"])
def test_a_cpu_runs_it_too(case: Any) -> None:
    check(case, jax.jit(prefix_attention))


def test_a_row_costs_what_it_holds_and_no_part_is_without_work() -> None:
    """Programs are enough for a GPU, parts are short, and a short cache is not cut."""
    for heads, slots in ((16, 131_072), (1024, 131_072), (1, 1 << 22), (64, 100)):
        parts = triton_prefix.count_parts(heads, slots)
        assert parts == 1 or parts * triton_prefix.STEP <= slots
        assert parts <= triton_prefix.MOST_PARTS
    assert triton_prefix.count_parts(16, 131_072) * 16 >= triton_prefix.PROGRAMS
    assert triton_prefix.count_parts(1024, 131_072) * triton_prefix.LONGEST >= 131_072
    assert triton_prefix.count_parts(64, 100) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("case", [SMALL, DRAFTED, LONG, MANY], ids=["small", "drafted", "long", "many"])
def test_on_a_gpu(case: Any, dtype: Any) -> None:
    check(case, partial(prefix_attention, implementation="triton"), dtype)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_slots_behind_the_prefix_are_not_read_and_others_change_no_bit_on_a_gpu() -> None:
    run = jax.jit(partial(prefix_attention, implementation="triton"))
    q, k, v, counts, times = drawn(LONG)
    k, v = (x.at[1, 1:].set(jnp.nan).at[2, 9000:].set(jnp.nan) for x in (k, v))
    o, _ = run(q, k, v, counts, times)
    assert np.isfinite(o).all()
    alone, _ = run(q, k, v, counts.at[0].set(3), times)
    np.testing.assert_array_equal(alone[1:], o[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, "9.0 exactly (H100, H200), this is NVIDIA B200"),
        ({"dtype": jnp.float32}, "q is float32"),
        ({"cache": jnp.float8_e4m3fn}, "bfloat16, float16, float32, not float8_e4m3fn"),
        ({"width": 96}, "16, 32, 64, 128, not 96"),
        ({"slots": 0}, "one query and one key at least"),
        ({"queries": 17}, "64 queries may share a key head, these are 68"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "width": 64, "slots": 4096, "queries": 16} | change
    q = jax.ShapeDtypeStruct((2, call["queries"], 8, call["width"]), call["dtype"])
    k = jax.ShapeDtypeStruct((2, call["slots"], 2, call["width"]), call.get("cache", call["dtype"]))
    assert reason in (prefix_why.why_not(call["device"], q, k, k, None, None) or "it can run")


def test_stands_back_where_jax_has_no_triton(monkeypatch: Any) -> None:
    q = jax.ShapeDtypeStruct((1, 1, 8, 64), jnp.bfloat16)
    assert prefix_why.why_not(HOPPER, q, q, q, None, None) is None
    monkeypatch.setattr(_hopper, "find_spec", lambda name: None)
    assert "no Pallas backend" in (prefix_why.why_not(HOPPER, q, q, q, None, None) or "it can run")


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, counts, times = drawn(SMALL)
    with pytest.raises(ValueError, match="H a multiple of G"):
        prefix_attention(q[..., :32], k, v, counts, times)
    with pytest.raises(ValueError, match=r"shapes \(2, 1\) and \(2, 300\)"):
        prefix_attention(q, k, v, counts[:1], times)
    with pytest.raises(ValueError, match="this is cpu"):
        prefix_attention(q, k, v, counts, times, implementation="triton")
