"""What a rule leaves of a ring: the hops and the global keys that travel, and exactness over 2, 4 and 8 devices."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.parallel.attention import context
from jaxblt.parallel.attention.by_time import document_times, row_times
from jaxblt.parallel.attention.context import attend_rows
from jaxblt.parallel.attention.hops import Exchange, plan_exchange
from jaxblt.parallel.attention.plan import Asked, Call, Plan, plan_call
from jaxblt.parallel.sequence import SeqAxis
from jaxblt.testing.collectives import collectives
from pallas_kernels import _jax_triton
from pallas_kernels.attention import attention, masks
from pallas_kernels.attention.presets import bigbird, longformer
from pallas_kernels.attention.rules import (
    ByBlock,
    Custom,
    Dilated,
    Global,
    Interval,
    PrefixLM,
    RandomBlocks,
    Rule,
    Strided,
)
from pallas_kernels.runtime import Device, compiling_for
from tests.parallel.along import ROWS, along, segments
from tests.parallel.exact import attention_passes
from tests.tolerances import assert_close

DEVICES, STRETCH = 8, 6
RULES: dict[str, Rule] = {
    "window": Interval(4, 0),
    "both": Interval(5, 8),
    "strided": Strided(16),
    "dilated": Dilated(16),
    "blocks": ByBlock(Interval(1, 0), 4),
    "odd blocks": ByBlock(Strided(3), 5),
    "random": RandomBlocks(1, block=16) & Interval(9),
    "prefix": PrefixLM(3) & Interval(7, 2),
    "first": Interval(3) | Global(first=2),
    "firsts": Global(first=1) | (Dilated(20) | Global(first=3)),
    "every": Interval(2, 2) | Global(every=12, rows=False),
    "outside": ~Interval(30, 30),
    "custom": Custom(lambda q, k: q - k == 7) & Interval(8, 0),
}  # fmt: skip


def plan(rule: Rule, causal: bool, devices: int = DEVICES) -> Plan:
    return Plan("by_time", axis=SeqAxis("seq", devices), causal=causal, rule=rule)


def pairs(starts: tuple[int, ...], rule: Rule, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys that each query sees in a row whose documents begin at `starts`, and positions."""
    index = np.arange(DEVICES * STRETCH)
    first = np.asarray(starts)[np.searchsorted(starts, index, side="right") - 1]
    time = (index - first).astype(np.int32)
    return shown(rule, causal, time[None], first[None] + 1)[0], time


def shown(rule: Rule, causal: bool, times: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the keys that each query sees, [B, T, T]."""
    q, k = times[:, :, None], times[:, None]
    seen = np.asarray(rule.sees(q, k)) & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
    return seen & (q >= k) if causal else seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_every_key_that_a_query_sees_reaches_it(name: str, causal: bool) -> None:
    rng, rule, device = np.random.default_rng(0), RULES[name], np.arange(DEVICES * STRETCH) // STRETCH
    hop = (device[:, None] - device[None]) % DEVICES
    for starts in [(0,), *((0, *np.sort(rng.choice(np.arange(1, 48), 3, replace=False))) for _ in range(20))]:
        hops, first = plan_exchange(plan(rule, causal), STRETCH, packed=len(starts) > 1)
        seen, time = pairs(starts, rule, causal)
        missing = seen & ~np.isin(hop, (0, *hops))
        assert not np.any(missing & (time[None] >= first))
        if len(starts) == 1 and not first and name not in ("random", "custom"):
            assert set(hops) == set(hop[seen]) - {0}


def test_hops_that_show_nothing_are_left_out() -> None:
    def left(rule: Rule, causal: bool = True, packed: bool = False) -> Exchange:
        return plan_exchange(plan(rule, causal), 64, packed=packed)

    every = tuple(range(1, DEVICES))
    for packed in (False, True):
        assert left(Interval(63, 0), packed=packed) == ((1,), 0)
        assert left(Interval(64, 0), packed=packed) == ((1,), 0)
        assert left(Interval(65, 0), packed=packed) == ((1, 2), 0)
        assert left(Interval(63, 63), False, packed) == ((1, 7), 0)
        assert left(ByBlock(Interval(1, 0), 16), packed=packed) == ((1,), 0)
        assert left(longformer(window=64, first=4), packed=packed) == ((1,), 4)
        assert left(longformer(window=64, first=4), False, packed) == (every, 0)
        assert left(bigbird(block=1), packed=packed) == (every, 0)
        assert left(bigbird(block=4) & Interval(100), packed=packed) == ((1, 2), 0)
        assert left(Global(first=4) | Interval(after=0), packed=packed) == (every, 0)
    assert left(Strided(256)) == left(Strided(256), packed=True) == ((4,), 0)


LENGTH, HEADS, GROUPS, WIDTH = 96, 2, 1, 8
FAR = pytest.mark.slow(days=28, group="rings and splits")


@pytest.mark.parametrize(
    ("rule", "causal", "layout", "devices", "hops", "gathers"),
    [
        (Interval(9, 0), True, "whole", 8, 1, 0),
        (longformer(window=8, first=6), True, "crossing", 8, 1, 1),
        pytest.param(Strided(24), True, "inside", 8, 3, 0, marks=FAR),
        pytest.param(longformer(window=8, first=6), True, "holes", 4, 1, 1, marks=FAR),
        pytest.param(bigbird(block=4, random=1) & Interval(20, 0), True, "padded", 4, 1, 0, marks=FAR),
        pytest.param(Interval(9, 9), False, "holes", 4, 2, 0, marks=FAR),
        pytest.param(longformer(window=8, first=6), False, "whole", 2, 1, 0, marks=FAR),
    ],
)
def test_is_exact_with_what_is_left(
    rule: Rule, causal: bool, layout: str, devices: int, hops: int, gathers: int
) -> None:
    """Value and gradients equal f64, and the program sends k, v forward and their gradients back, once a hop."""
    wanted, ids = plan(rule, causal, devices), segments(layout, LENGTH)
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((ROWS, LENGTH, heads, WIDTH)).astype(np.float32)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    documents = np.ones((ROWS, LENGTH), np.int32) if ids is None else ids
    times = np.asarray(document_times(jnp.asarray(documents), None))

    def passes(_: None, q: Any, k: Any, v: Any, do: Any, ids: Any) -> Any:
        axis = wanted.devices
        places = row_times(ROWS, LENGTH, axis) if ids is None else document_times(ids, axis)
        hides = None if ids is None else jnp.maximum(ids, 0)
        o, back = jax.vjp(lambda q, k, v: attend_rows(wanted, q, k, v, hides, None, places), q, k, v)
        return o, *back(do)

    found, compiled = along(passes, None, (q, k, v, do, ids), seq=devices)
    expected = attention_passes(q, k, v, do, seen=shown(rule, causal, times, documents))
    for got, want, what in zip(found, expected, ("o", "dq", "dk", "dv"), strict=True):
        assert_close(got, want, n=LENGTH * WIDTH, what=what)
    sent = [c for c in collectives(compiled) if c.dtype == "f32"]
    assert Counter(c.kind for c in sent) == Counter(
        {"collective-permute": 4 * hops, "all-gather": 2 * gathers, "reduce-scatter": 2 * gathers}
    )
    stretch = ROWS * LENGTH // devices * GROUPS * WIDTH * 4
    assert sum(c.bytes for c in sent if c.kind == "collective-permute") == 4 * hops * stretch
    assert all(c.bytes == ROWS * devices * 6 * GROUPS * WIDTH * 4 for c in sent if c.kind == "all-gather")


@pytest.mark.parametrize(("causal", "layout"), [(True, "holes"), (False, "whole")])
def test_gathered_keys_are_met_by_tiles(causal: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's queries reach a kernel as the runs that it is told; causal ones in early and late runs."""

    def split(q: Any, k: Any, v: Any, mask: Any, *, runs: Any, device: Any, scale: Any) -> Any:
        each = k.shape[1] // sum(map(len, runs))
        starts = each * jnp.asarray(runs, jnp.int32)[device]
        places = (starts[:, None] + jnp.arange(each, dtype=jnp.int32)[None]).reshape(1, -1)
        here, there = (jnp.broadcast_to(x, (len(q), x.size)) for x in (places, jnp.arange(k.shape[1])[None]))
        return attention(q, k, v, mask & masks.positions(here, there), scale=scale)

    monkeypatch.setattr(context, "split_attention", split)
    rule, axis = ByBlock(Strided(3), 4), SeqAxis("seq", 4)
    wanted = Plan("all_gather", axis=axis, causal=causal, rule=rule, swaps=causal)
    ids, rng = segments(layout, LENGTH), np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((ROWS, LENGTH, heads, WIDTH)).astype(np.float32)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )

    def passes(_: None, q: Any, k: Any, v: Any, do: Any, ids: Any) -> Any:
        hides = None if ids is None else jnp.maximum(ids, 0)
        o, back = jax.vjp(lambda q, k, v: attend_rows(wanted, q, k, v, hides, None), q, k, v)
        return o, *back(do)

    found, _ = along(passes, None, (q, k, v, do, ids), seq=4)
    documents = np.ones((ROWS, LENGTH), np.int32) if ids is None else ids
    index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), documents.shape)
    expected = attention_passes(q, k, v, do, seen=shown(rule, causal, index, documents))
    for got, want, what in zip(found, expected, ("o", "dq", "dk", "dv"), strict=True):
        assert_close(got, want, n=LENGTH * WIDTH, what=what)


def test_rules_gather_keys_where_a_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of positions in packed rows go round a ring, and so does what no kernel takes."""
    monkeypatch.setattr(_jax_triton, "find_spec", lambda name: name)

    def route(rule: Rule, device: Device, *, packed: bool = False) -> tuple[str, bool]:
        asked = Asked(4, 2, 128, causal=True, window=None, alibi=False, packed=packed, rule=rule)
        shape = {"rows": 1, "tokens": 1024, "dtype": jnp.bfloat16, "has_ids": True}
        with compiling_for(device):
            found = plan_call(Call(asked, **shape, axis=SeqAxis("seq", 2), split=True))
        return found.route, found.swaps

    blocks, hopper = ByBlock(Strided(3), 128), Device("gpu", (9, 0), "NVIDIA H200")
    assert route(blocks, hopper) == route(Strided(256), hopper, packed=True) == ("all_gather", True)
    assert route(blocks, hopper, packed=True) == route(blocks, Device("cpu")) == ("by_time", False)
