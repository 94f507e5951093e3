"""One new token a row: the kernel, interpreted and on a GPU, and the definition as attention to the written cache."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import Device, compiling_for
from pallas_kernels.attention import EMPTY_LSE, prefix_attention, token_attention, token_parts, triton_token
from pallas_kernels.attention import token as api
from tests.tolerances import assert_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")


class Case(NamedTuple):
    """A cache, the time of each row's token, and rows without a token, and with a new document."""

    heads: int
    groups: int
    width: int
    slots: int
    now: tuple[int, ...]
    window: int | None = None
    idle: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    turned: bool = True


CASES = {
    "lone": Case(2, 2, 64, 256, (130,)),
    "shared": Case(8, 2, 32, 300, (0, 7, 299), turned=False),
    "idle and new": Case(4, 2, 16, 200, (60, 150, 0, 5), idle=(1, 3), fresh=(2, 3)),
    "ring": Case(2, 1, 64, 128, (3, 127, 128, 1000), window=128, idle=(1,)),
    "long": Case(4, 1, 128, 8192, (8191, 63, 4000)),
}
SMALL = ("lone", "shared", "idle and new", "ring")


def drawn(case: Case, dtype: Any = jnp.bfloat16, parts: int = 2) -> tuple[Any, ...]:
    """Return arguments; one slot in five holds nothing."""
    rng, rows = np.random.default_rng(0), len(case.now)
    heads = rng.standard_normal((parts, rows, (case.heads + 2 * case.groups) * case.width))
    k, v = (rng.standard_normal((rows, case.slots, case.groups, case.width)).astype(dtype) for _ in "kv")
    now, slot = np.array(case.now)[:, None], np.arange(case.slots)[None]
    # The last token before now that went to each slot
    times = now - 1 - (now - 1 - slot) % case.slots
    times = np.where((times >= 0) & (rng.random(times.shape) < 0.8), times, -1)
    kept, fresh = np.ones(rows), np.zeros(rows)
    kept[list(case.idle)], fresh[list(case.fresh)] = 0, 1
    marks = np.stack([np.array(case.now) + 1_000_000, case.now, kept, fresh], 1)
    turns = 10_000 ** (-np.arange(0, case.width, 2) / case.width) / (2 * np.pi) * 2.0**32
    arrays = heads.astype(np.float32), k, v, times.astype(np.int32), marks.astype(np.int32)
    return *jax.device_put(arrays), jax.device_put(turns.astype(np.uint32)) if case.turned else None


def options(case: Case) -> dict[str, Any]:
    return {"dtype": jnp.bfloat16, "window": case.window, "scale": case.width**-0.5}


@cache
def definition(case: Case) -> Any:
    return jax.jit(partial(token_attention, implementation="reference", **options(case)))


def check(case: Case, run: Any, dtype: Any = jnp.bfloat16) -> None:
    arrays = drawn(case, dtype)
    known = definition(case)(*arrays)
    found = api.TokenAttention(*run(*arrays, **options(case)))
    some = np.asarray(known.lse) > EMPTY_LSE
    assert ((np.asarray(found.lse) > EMPTY_LSE) == some).all()
    assert_close(found.o, np.asarray(known.o), jnp.bfloat16, n=case.slots)
    assert_close(np.where(some, found.lse, 0), np.where(some, known.lse, 0), jnp.bfloat16, n=case.width)
    assert (np.asarray(found.o)[~some] == 0).all()
    np.testing.assert_array_equal(found.times, known.times)
    for new, same, old in zip(found[2:4], known[2:4], arrays[1:3], strict=True):
        assert_close(np.asarray(new, np.float32), np.asarray(same, np.float32), jnp.bfloat16, n=4)
        untouched = np.ones(new.shape[:2], bool)
        rows = [row for row in range(len(case.now)) if row not in case.idle]
        untouched[rows, np.array(case.now)[rows] % case.slots] = False
        np.testing.assert_array_equal(
            np.asarray(new, np.float32)[untouched], np.asarray(old, np.float32)[untouched]
        )


INTERPRETED = partial(triton_token.token_attention, interpret=True)


@pytest.mark.slow(days=28, group="properties of kernels", every=("ring", "idle and new"))
@pytest.mark.parametrize("name", SMALL)
def test_interpreted(name: str) -> None:
    check(CASES[name], INTERPRETED)


@pytest.mark.slow(days=28, group="costly")
def test_a_cache_of_another_dtype_interpreted() -> None:
    check(CASES["ring"], INTERPRETED, jnp.float32)


def merged(found: api.TokenAttention) -> np.ndarray:
    o, lse = np.asarray(found.o, np.float64), np.asarray(found.lse, np.float64)
    weights = np.where(lse > EMPTY_LSE, np.exp(lse - lse.max(0)), 0)
    return (o * weights[..., None]).sum(0) / np.maximum(weights.sum(0), 1e-30)[..., None]


@pytest.mark.parametrize("name", SMALL)
def test_the_definition_is_attention_to_the_written_cache(name: str) -> None:
    """Nothing is turned here; `tests/models/test_lone_token.py` compares with rotary positions."""
    case = CASES[name]
    *arrays, _ = drawn(case)
    found = definition(case)(*arrays, None)
    rows, _, groups, width = found.k.shape
    joined = np.asarray(arrays[0]).sum(0).astype(jnp.bfloat16).reshape(rows, 1, -1, width)
    _, now, kept, _ = np.asarray(arrays[4]).T
    times = np.asarray(found.times)
    if case.window is not None:
        times = np.where(times > now[:, None] - case.window, times, -1)
    counts = np.where(kept > 0, now + 1, 0)[:, None]
    attended = joined[:, :, : -2 * groups], found.k, found.v, counts, times
    known = jax.jit(partial(prefix_attention, implementation="reference"))(*attended)
    assert_close(merged(found).astype(np.float32), np.asarray(known.o)[:, 0], jnp.bfloat16, n=case.slots)
    written = np.asarray(found.k)[np.arange(rows), now % case.slots]
    own = joined[:, 0, -2 * groups : -groups]
    for row in range(rows):
        assert (row in case.idle) or (written[row] == own[row]).all()
        if row in case.fresh:
            assert (times[row] >= 0).sum() == (row not in case.idle)


def test_rows_change_no_bit_of_others_interpreted() -> None:
    case = CASES["ring"]
    heads, k, v, times, marks, turns = drawn(case)
    found = INTERPRETED(heads, k, v, times, marks, turns, **options(case))
    moved = np.array(marks)
    moved[0, 1] = 0
    other = INTERPRETED(heads, k, v, times, jax.device_put(moved), turns, **options(case))
    for x, y in zip(found[:2], other[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:, 1:], np.asarray(y)[:, 1:])


def test_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["lone"]
    heads, k, v, *rest = drawn(case, jnp.float32)

    def gradients(name: Any) -> Any:
        def loss(heads: Any, k: Any, v: Any) -> Any:
            found = token_attention(heads, k, v, *rest, implementation=name, **options(case))
            return jnp.sum(found.o**2) + jnp.sum(found.k**2)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(heads, k, v)

    known = gradients("reference")
    monkeypatch.setattr(triton_token, "token_attention", INTERPRETED)
    with compiling_for(HOPPER):
        found = gradients("triton")
    for got, want in zip(found, known, strict=True):
        assert_close(got, np.asarray(want), jnp.bfloat16, n=case.slots)


def test_parts_fill_a_gpu_and_are_not_short() -> None:
    assert token_parts.count_parts(16, 8192) == token_parts.MOST_PARTS
    assert token_parts.count_parts(64, 8192) * 64 >= token_parts.PROGRAMS
    assert token_parts.count_parts(1, 100) == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str, dtype: Any) -> None:
    def run(*given: Any, **chosen: Any) -> Any:
        return jax.jit(partial(token_attention, implementation="triton", **chosen))(*given)

    check(CASES[name], run, dtype)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": Device("gpu", (10, 0), "NVIDIA B200")}, "9.0 exactly (H100, H200), this is NVIDIA B200"),
        ({"dtype": jnp.float32}, "q is float32"),
        ({"slots": 8193}, "at most 8192 slots, this one has 8193"),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str) -> None:
    call = {"device": HOPPER, "dtype": jnp.bfloat16, "slots": 4096} | change
    k = jax.ShapeDtypeStruct((1, call["slots"], 2, 64), jnp.bfloat16)
    heads = jax.ShapeDtypeStruct((1, 1, 8 * 64), jnp.float32)
    assert reason in (api.why_not(call["device"], heads, k, k, None, dtype=call["dtype"]) or "it can run")


def test_what_does_not_fit_is_refused() -> None:
    heads, k, v, times, marks, turns = drawn(CASES["lone"])
    run = partial(token_attention, **options(CASES["lone"]))
    with pytest.raises(ValueError, match="H a multiple of G"):
        run(heads[..., 1:], k, v, times, marks, turns)
    with pytest.raises(ValueError, match=r"expected times \(1, 256\) and marks \(1, 4\)"):
        run(heads, k, v, times, marks[:, :3], turns)
    with pytest.raises(ValueError, match="expected 32 frequencies"):
        run(heads, k, v, times, marks, turns[:3])
