"""The Triton kernels: their lists on the CPU, interpreted where triton is installed, run on a GPU, what they refuse."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _jax_triton
from pallas_kernels._dispatch import Device
from pallas_kernels.attention import (
    Chosen,
    SoftCap,
    attention,
    explain,
    masks,
    presets,
    split_attention,
    triton_gpu,
    triton_lists,
)
from pallas_kernels.attention.blocks import Blocks
from pallas_kernels.attention.rules import (
    BlocksBefore,
    ByBlock,
    Custom,
    Global,
    Interval,
    RandomBlocks,
    Strided,
)
from pallas_kernels.attention.triton_lists import (
    HIDDEN,
    SHOWN,
    Lists,
    Tiles,
    choose_lists,
    find_tiles,
    make_lists,
)
from pallas_kernels.attention.triton_why import Kernels, Tile, make_plan, why_not, why_not_split
from tests.pallas_kernels.attention.triton_interpreter import interpreting
from tests.tolerances import assert_close, assert_norms_close

HOPPER = Device("gpu", (9, 0), "NVIDIA H200")
LISTS = Chosen(jnp.zeros((1, 1, 256, 1), jnp.int32))
TINY = Kernels(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(32, 16, 4, 2))


def _third(q: Any, k: Any) -> Any:
    return (q + k) % 3 > 0


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call in 16 bits; lengths are of documents, and a last document is padding."""

    name: str
    mask: masks.Mask
    tokens: int = 1024
    keys: int | None = None
    heads: int = 4
    groups: int = 2
    width: int = 128
    dtype: Any = jnp.bfloat16
    lengths: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return self.name

    def tags(self) -> Any:
        """Return segment ids [B, T], or None."""
        rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in self.lengths]
        ids = [np.pad(row, (0, self.tokens - len(row))) for row in rows]
        return jnp.asarray(np.stack(ids), jnp.int32) if ids else None

    def arrays(self) -> list[jax.Array]:
        """Return q, k, v and the cotangent of the output."""
        keys = jax.random.split(jax.random.key(len(self.name)), 4)
        counts = (self.heads, self.groups, self.groups, self.heads)
        lengths = (self.tokens, *(self.keys or self.tokens,) * 2, self.tokens)
        shapes = [(2, length, n, self.width) for length, n in zip(lengths, counts, strict=True)]
        return [jax.random.normal(key, shape, self.dtype) for key, shape in zip(keys, shapes, strict=True)]

    def passes(self, run: Any) -> Any:
        """Return the program that makes the output and the gradients of q, k and v."""
        mask = self.mask & masks.documents(self.tags())

        @jax.jit
        def both(*args: jax.Array) -> Any:
            o, back = jax.vjp(lambda *x: run(*x, mask), *args[:3])
            return (o, *back(args[3].astype(o.dtype)))

        return lambda arrays: [np.asarray(x) for x in both(*arrays)]

    def check(self, run: Any) -> None:
        arrays = self.arrays()
        found = self.passes(run)(arrays)
        wide = [x.astype(jnp.float32) for x in arrays]
        expected = self.passes(partial(attention, implementation="reference"))(wide)
        assert_close(found[0], expected[0], self.dtype, self.tokens, "o")
        for name, got, want in zip(("dq", "dk", "dv"), found[1:], expected[1:], strict=True):
            parts = np.ndindex(got.shape[0], got.shape[2])
            assert_norms_close(got, want, [(b, slice(None), h) for b, h in parts], self.dtype, 1, name)


CALLS = (
    Call(name="bigbird", mask=masks.CAUSAL & presets.bigbird(block=128, random=1)),
    Call(name="random fp16", mask=masks.FULL & RandomBlocks(2, 1, 128), dtype=jnp.float16, groups=4),
    Call(name="window of both sides", mask=masks.window(100), tokens=960, heads=2),
    Call(name="blocks of 64", mask=masks.CAUSAL & RandomBlocks(3), width=64, heads=8),
    Call(name="strided", mask=masks.FULL & Strided(3), tokens=512, dtype=jnp.float16, width=64),
    Call(name="sees nothing", mask=masks.CAUSAL & ~Interval(129) & Custom(_third), heads=2),
    Call(
        name="packed window",
        mask=masks.CAUSAL & masks.window(300),
        lengths=((200, 700, 100), (5, 500, 400, 119)),
        width=64,
    ),
    Call(
        name="packed rule",
        mask=masks.CAUSAL & ByBlock(Interval(2, 0), 128) & Global(every=2, rows=False),
        lengths=((1024,), (0, 333)),
        groups=1,
    ),
)


def _seen(lists: Lists, grid: Blocks, tags: Any) -> tuple[np.ndarray, int]:
    """Walk the lists as a kernel does: return how often each pair of tokens is visited, and the partial tiles."""
    rows, ends, columns, numbers, seen = map(np.asarray, lists)
    visited, partial = np.zeros((grid.rows, grid.columns, grid.block_q, grid.block_k), int), 0
    for row, (first, middle, last) in zip(rows, ends, strict=True):
        assert middle < last, "a row has no partial tile"
        for i in range(first, last):
            tile = seen[numbers[i]] if i >= middle else np.ones_like(seen[0])
            if tags is not None and i >= middle:
                q, k = (
                    np.asarray(x).reshape(-1, n)
                    for x, n in zip(tags, (grid.block_q, grid.block_k), strict=True)
                )
                tile = tile * (q[row][:, None] == k[columns[i]][None])
            visited[row, columns[i]] += tile
            partial += i >= middle
    return visited.swapaxes(1, 2).reshape(grid.queries, grid.keys), partial


LISTED = (
    masks.CAUSAL & presets.bigbird(block=8, random=1),
    masks.FULL & presets.local_global(before=9, after=3, every=32),
    masks.CAUSAL & Custom(_third),
    masks.window(20),
    masks.CAUSAL & (Interval(before=-40) & Strided(1)),
)


@pytest.mark.slow(days=28, group="properties of kernels", every="0")
@pytest.mark.parametrize("number", range(len(LISTED)))
def test_lists_visit_each_visible_pair_once(number: int) -> None:
    """On the host and on the device, by query and by key."""
    mask = LISTED[number]
    ids = jnp.asarray(np.repeat([1, 2, 0, 3], [20, 29, 7, 40])[None], jnp.int32)
    grid = Blocks(96, 96, 16, 8, mask.interval, by_index=True)
    tiles = find_tiles(grid, mask.rule)
    assert not isinstance(tiles, str)
    flipped = Blocks(96, 96, 8, 16, mask.interval, by_index=True)

    def both_ways(q: Any, k: Any) -> tuple[Lists, Lists]:
        return make_lists(grid, tiles, q, k), make_lists(grid, tiles, q, k, transposed=True)

    for whole in (mask, mask & masks.documents(ids)):
        tags = [x[0] for x in whole.tags(96, 96)] if whole.has_tags else None
        truth = np.asarray(jax.jit(lambda whole=whole: whole.seen(96, 96))())[0, 0, 0].astype(int)
        by_query, by_key = jax.jit(both_ways)(*tags) if tags else both_ways(None, None)
        found, partial = _seen(by_query, grid, tags)
        np.testing.assert_array_equal(found, truth)
        found, _ = _seen(by_key, flipped, tags and tags[::-1])
        np.testing.assert_array_equal(found, truth.T)
        assert partial < grid.rows * grid.columns


def test_equal_tiles_are_kept_once() -> None:
    """All those on the diagonal of a causal mask are one tile."""
    grid = Blocks(1024, 1024, 64, 64, masks.CAUSAL.interval, by_index=True)
    tiles = find_tiles(grid, None)
    assert not isinstance(tiles, str)
    assert len(tiles.seen) == 3
    assert not tiles.seen[HIDDEN].any()
    assert tiles.seen[SHOWN].all()
    np.testing.assert_array_equal(tiles.numbers, np.where(np.eye(16, dtype=bool), 2, SHOWN))
    np.testing.assert_array_equal(tiles.live.full, np.tri(16, k=-1, dtype=bool))


def test_devices_share_the_lists_of_a_row() -> None:
    """Each visits the pairs of its runs; room behind shorter lists is visited by none."""
    mask = masks.CAUSAL & ByBlock(Strided(3), 8)
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    plan = replace(make_plan(HOPPER, x, x, mask, None), kernels=TINY, runs=((0, 3), (1, 2)))
    tiles = find_tiles(grid := plan.grid(TINY.forward), mask.rule)
    assert isinstance(tiles, Tiles)
    truth = np.asarray(mask.seen(128, 128))[0, 0, 0]
    own = [tiles.of_rows(plan.rows_of(device, grid.rows)) for device in range(2)]
    for transposed in (False, True):
        each = [make_lists(grid, part, None, None, transposed=transposed) for part in own]
        for device, runs in enumerate(plan.runs):
            lists = jax.jit(choose_lists)(each, device)
            shape = (grid.block_k, grid.block_q) if transposed else (grid.block_q, grid.block_k)
            sides = (128, 64) if transposed else (64, 128)
            found, _ = _seen(lists, Blocks(*sides, *shape, mask.interval, by_index=True), None)
            rows = np.concatenate([truth[32 * run : 32 * (run + 1)] for run in runs])
            np.testing.assert_array_equal(found, rows.T if transposed else rows)


def test_too_many_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Blocks(4096, 4096, 64, 64, Interval(), by_index=True)
    rule = Strided(61)
    monkeypatch.setattr(triton_lists, "MOST_DISTINCT", 50)
    assert "more than 50 partial tiles differ" in str(find_tiles(grid, rule & Strided(1)))
    monkeypatch.setattr(triton_lists, "MOST_PARTIAL", 100)
    assert "4096 pairs of tiles are partial" in str(find_tiles(grid, rule & Strided(1) & Strided(61)))
    monkeypatch.setattr(triton_lists, "MOST_PAIRS", 4095)
    assert "64 x 64 pairs of tiles are more than 4095" in str(find_tiles(grid, rule | Strided(61)))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": Device("gpu", (8, 0), "NVIDIA A100"), "tokens": 64, "width": 64}, None),
        ({"mask": masks.CAUSAL & masks.documents(jax.ShapeDtypeStruct((2, 256), jnp.int32))}, None),
        ({"device": Device("cpu")}, "for NVIDIA GPUs of compute capability 8.0 or newer, this is cpu"),
        ({"score": SoftCap(2.0)}, "no function of scores"),
        ({"alibi_slopes": jax.ShapeDtypeStruct((4,), jnp.float32)}, "no slopes"),
        ({"dtype": jnp.float32}, "bfloat16 and float16 alone, not float32"),
        ({"width": 96}, "heads are of size 64 or 128, not 96"),
        ({"tokens": 250}, "multiples of 64 tokens, these are 250 queries"),
        ({"scale": -1.0}, "positive scales alone, not -1.0"),
        ({"mask": masks.window(100), "tokens": (1 << 17) + 64}, "4098 x 2049 pairs of tiles are more than"),
        ({"mask": masks.CAUSAL & LISTS}, None),
        ({"mask": masks.FULL & (LISTS & Interval(99, 0))}, None),
        ({"mask": masks.FULL & (LISTS | Interval(3))}, "joined to no other rule"),
        ({"mask": masks.FULL & Chosen(LISTS.lists, 48)}, "chosen blocks of 16, 32, 64, 128 keys, not of 48"),
        (
            {"mask": masks.positions(*[jax.ShapeDtypeStruct((2, 256), jnp.int32)] * 2)},
            "this mask reads positions",
        ),
    ],
)
def test_says_why_not(change: dict[str, Any], reason: str | None) -> None:
    given = {"tokens": 256, "width": 128, "dtype": jnp.bfloat16, "device": HOPPER, "mask": masks.CAUSAL}
    given |= change
    tokens, width, dtype, device, mask = (given.pop(name) for name in list(given)[:5])
    q = jax.ShapeDtypeStruct((2, tokens, 4, width), dtype)
    found = why_not(device, q, q, q, mask, **given)
    assert found is None if reason is None else reason in (found or "it can run")


@pytest.mark.usefixtures("installed")
def test_rules_go_to_triton_on_a_gpu_and_other_masks_to_cudnn() -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    assert explain(x, x, masks.CAUSAL, device=HOPPER) == "attention: cudnn on NVIDIA H200"
    idle = masks.CAUSAL & (Interval(before=4096) | Global(first=4))
    assert explain(x, x, idle, device=HOPPER) == "attention: cudnn on NVIDIA H200"
    rule = masks.CAUSAL & presets.bigbird()
    assert explain(x, x, rule, device=HOPPER).startswith("attention: triton on NVIDIA H200 (not cudnn")
    said = explain(x, x, rule, score=SoftCap(2.0), device=HOPPER)
    assert said.startswith("attention: xla on NVIDIA H200 (not cudnn: it visits all")


@pytest.mark.parametrize(("block", "tokens", "rows"), [(128, 1024, 128), (64, 1024, 64), (128, 960, 64)])
def test_tiles_follow_blocks_and_lengths(block: int, tokens: int, rows: int) -> None:
    q = jax.ShapeDtypeStruct((1, tokens, 4, 128), jnp.bfloat16)
    plan = make_plan(HOPPER, q, q, masks.CAUSAL & RandomBlocks(1, 0, block), None)
    assert plan.kernels.forward.rows == plan.kernels.queries.rows == plan.kernels.keys.rows == rows


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted, in small tiles."""
    plan = triton_gpu.make_plan
    monkeypatch.setattr(triton_gpu, "make_plan", lambda *args: replace(plan(*args), kernels=TINY))
    with interpreting(monkeypatch, "pallas_kernels.attention.triton_kernel"):
        yield


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels", every="packed-0")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", range(len(LISTED)))
@pytest.mark.parametrize("lengths", [(), ((20, 37), (64,))], ids=["whole", "packed"])
def test_interpreted(number: int, lengths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls one finds the gradients of keys by heads of queries."""
    monkeypatch.setattr(triton_gpu, "FEW", 128 * (number % 2))
    small = {"tokens": 64, "width": 16, "dtype": jnp.float16, "lengths": lengths}
    Call(name="small", mask=LISTED[number], **small).check(triton_gpu.attention)


RUNS = ((0, 3), (1, 2))
"""Of queries of two devices."""


def by_devices(split: Any, q: Any, k: Any, v: Any, mask: masks.Mask) -> Any:
    """Return what both devices find of their queries, in the order of the row."""
    quarters, parts = jnp.split(q, 4, 1), {}
    for device, runs in enumerate(RUNS):
        own = replace(mask, segments=None)
        if mask.segments is not None:
            ids = jnp.split(mask.segments.q, 4, 1)
            own &= masks.documents(jnp.concatenate([ids[run] for run in runs], 1), mask.segments.of_keys)
        queries = jnp.concatenate([quarters[run] for run in runs], 1)
        found = split(queries, k, v, own, RUNS, jnp.int32(device))
        parts |= dict(zip(runs, jnp.split(found, 2, 1), strict=True))
    return jnp.concatenate([parts[run] for run in range(4)], 1)


SPLIT = (
    {"mask": masks.CAUSAL & ByBlock(Strided(3), 8)},
    {"mask": masks.CAUSAL & ByBlock(Strided(3), 8), "lengths": ((40, 70), (128,))},
    {"mask": masks.FULL & BlocksBefore(4), "keys": 32},
)
"""Rows of 128 tokens whose queries two devices hold; on a GPU of 1,024, and all else is larger, too."""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels", every="packed")
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("given", SPLIT, ids=["whole", "packed", "pooled"])
def test_queries_of_two_devices_interpreted(given: dict[str, Any]) -> None:
    call = Call(name="split", tokens=128, width=16, dtype=jnp.float16, **given)
    call.check(partial(by_devices, triton_gpu.split_attention))


@pytest.mark.gpu
@pytest.mark.parametrize("given", SPLIT, ids=["whole", "packed", "pooled"])
def test_queries_of_two_devices_on_a_gpu(given: dict[str, Any]) -> None:
    lengths = tuple(tuple(8 * n for n in row) for row in given.get("lengths", ()))
    call = Call(
        name="split", mask=given["mask"], lengths=lengths, keys=8 * given["keys"] if "keys" in given else None
    )
    call.check(partial(by_devices, triton_gpu.split_attention))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("tokens", "rule", "reason"),
    [
        (1024, ByBlock(Strided(3), 128), None),
        (256, Strided(3), "a multiple of 128 of the 256 queries"),
        (1024, None, "static rules alone"),
        (1024, LISTS, "static rules alone"),
    ],
)
def test_says_why_queries_are_not_split(tokens: int, rule: Any, reason: str | None) -> None:
    q, k = (jax.ShapeDtypeStruct((2, length, 4, 128), jnp.bfloat16) for length in (tokens // 2, tokens))
    found = why_not_split(HOPPER, q, k, masks.CAUSAL if rule is None else masks.CAUSAL & rule, RUNS)
    assert found is None if reason is None else reason in (found or "it can run")


def test_splitting_queries_needs_the_kernels() -> None:
    x, mask = jnp.zeros((1, 512, 2, 64), jnp.bfloat16), masks.CAUSAL & ByBlock(Strided(3), 128)
    with pytest.raises(ValueError, match="this is cpu; call attention with masks"):
        split_attention(x[:, :256], x, x, mask, runs=RUNS, device=jnp.int32(0))


RUN = partial(attention, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_on_a_gpu(call: Call) -> None:
    call.check(RUN)


@pytest.mark.gpu
@pytest.mark.parametrize("call", [CALLS[0], CALLS[-1]], ids=str)
def test_gradients_repeat_bit_for_bit(call: Call) -> None:
    arrays, run = call.arrays(), call.passes(RUN)
    first, *others = [run(arrays) for _ in range(3)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_blocks_that_no_query_sees_are_not_read_on_a_gpu() -> None:
    """NaN in them reaches neither the output nor a gradient."""
    hidden = lambda k: (k >= 256) & (k < 384)  # noqa: E731
    rule = Interval(before=255) & Custom(lambda q, k: ~hidden(k))
    call = Call(name="hidden", mask=masks.CAUSAL & rule)
    q, k, v, do = call.arrays()
    where = hidden(jnp.arange(call.tokens))[None, :, None, None]
    poisoned, run = [jnp.where(where, jnp.nan, x) for x in (k, v)], call.passes(RUN)
    for found, expected in zip(run([q, *poisoned, do]), run([q, k, v, do]), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_vmap_on_a_gpu() -> None:
    """Two calls at once are the two calls."""
    call = CALLS[0]
    q, k, v, _ = call.arrays()
    run = jax.jit(jax.vmap(lambda q, k, v: RUN(q, k, v, call.mask), in_axes=(0, None, None)))
    both = run(jnp.stack([q, 2 * q]), k, v)
    for found, each in zip(both, (q, 2 * q), strict=True):
        np.testing.assert_array_equal(found, jax.jit(partial(RUN, mask=call.mask))(each, k, v))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.usefixtures("interpreter")
def test_pooled_blocks_interpreted() -> None:
    """Queries that are more than the keys, each of which stands for a block of them."""
    call = Call(
        name="pooled", mask=masks.FULL & BlocksBefore(2), tokens=64, keys=32, width=16, dtype=jnp.float16
    )
    call.check(triton_gpu.attention)
