"""Attention over a split sequence equals dense attention, in values and in all gradients; and what it compiles to."""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.models.remat import ALWAYS_SAVED, _policy
from jaxblt.parallel import make_mesh
from jaxblt.parallel.attention import ring
from jaxblt.parallel.attention.context import context_attention
from jaxblt.parallel.attention.plan import SHORT
from jaxblt.parallel.attention.ring import SAVED_LSE, SAVED_OUT, _pack, _unpack
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG, SequenceLayout
from pallas_kernels._dispatch import compiling_for
from pallas_kernels.attention import attention, masks
from tests.parallel.exact import attention_passes
from tests.tolerances import relative_error

EXACT = 1e-5
"""Of fp32 results, in units of the root mean square of the dense ones, which are f64."""


@dataclass(frozen=True, kw_only=True)
class Case:
    devices: int
    causal: bool = True
    window: int | None = None
    layout: SequenceLayout = CONTIGUOUS
    heads: int = 4
    groups: int = 2
    head_dim: int = 8
    segments: bool = False
    packed: bool = True
    alibi: bool = False
    mode: Any = "ring"
    length: int = 64

    def __str__(self) -> str:
        mask = ("causal" if self.causal else "full") + (f"_w{self.window}" if self.window else "")
        tail = ("_segments" if self.segments else "_holes" if not self.packed else "") + (
            "_alibi" if self.alibi else ""
        )
        heads = f"{self.heads}x{self.groups}x{self.head_dim}"
        return f"{self.mode}{self.devices}_{mask}_{self.layout.kind}_{heads}{tail}"

    def options(self) -> dict[str, Any]:
        slopes = jnp.asarray(2.0 ** -np.arange(1, self.heads + 1), jnp.float32)
        return {
            "causal": self.causal,
            "window": self.window,
            "alibi_slopes": slopes if self.alibi else None,
        }

    def split_options(self) -> dict[str, Any]:
        """What dense attention has no word for, besides."""
        return self.options() | {"mode": self.mode, "layout": self.layout, "packed": self.packed}

    def arrays(self, dtype: Any = np.float32) -> list[np.ndarray]:
        """q, k, v and the cotangent of the output."""
        rng, heads = np.random.default_rng(self.devices), (self.heads, self.groups, self.groups, self.heads)
        return [rng.standard_normal((2, self.length, h, self.head_dim)).astype(dtype) for h in heads]

    def segment_ids(self) -> jax.Array | None:
        """Documents across the edges of stretches, within one, stretches of padding alone, and holes.

        Not packed, one document a row: from its middle on with holes, and up to its middle with half of one stretch and
        all of another empty.
        """
        if not self.segments and self.packed:
            return None
        n, ids = self.length, np.zeros((2, self.length), np.int32)
        if not self.packed:
            ids[0, n // 2 + 3 :], ids[1, : n // 2] = 1, 1
            ids[0, ::5], ids[1, n // 16 : n // 4] = -1, -1
            return jnp.asarray(ids)
        ids[0, : n * 5 // 8], ids[0, n * 5 // 8 : n * 5 // 8 + 3], ids[0, n * 3 // 4 :] = 1, 2, 3
        ids[1, n // 2 :] = 4
        ids[1, n // 2 + 5 :: 7] *= -1
        return jnp.asarray(ids)


def passes(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Output and gradients of q, k, v."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[jax.Array, ...]:
        o, back = jax.vjp(attend, q, k, v)
        return (o, *back(do))

    return jax.jit(run)


def dense(case: Case, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Output and gradients in f64."""
    ids, place = case.segment_ids(), np.arange(case.length)
    distance = place[:, None] - place
    seen = np.ones((len(arrays[0]), case.length, case.length), bool)
    seen &= (distance >= 0) | (not case.causal)
    seen &= abs(distance) < (case.window or case.length)
    if ids is not None:
        ids = np.asarray(ids)
        seen &= (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
    return attention_passes(*arrays, seen=seen, slopes=case.options()["alibi_slopes"])


def mesh_of(case: Case) -> jax.sharding.Mesh:
    rows = 2 if 2 * case.devices <= jax.device_count() else 1
    return make_mesh(data=rows, seq=case.devices, devices=jax.devices()[: rows * case.devices])


def split(case: Case) -> tuple[Callable[..., Any], np.ndarray]:
    """The jitted passes over the mesh, and the order that the rows have to be in."""
    order, ids = case.layout.order(case.length, case.devices), case.segment_ids()
    ids = None if ids is None else ids[:, order]
    return passes(lambda q, k, v: context_attention(q, k, v, ids, **case.split_options())), order


def check(case: Case) -> None:
    arrays = case.arrays()
    run, order = split(case)
    with jax.set_mesh(mesh_of(case)):
        got = [np.asarray(x)[:, np.argsort(order)] for x in run(*(x[:, order] for x in arrays))]
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, dense(case, arrays), strict=True):
        error = np.abs(a - b).max() / (np.sqrt(np.mean(b**2)) or 1.0)
        assert error <= EXACT, f"{name} of {case}: {error:.1e}"


EACH_DAY = (
    Case(devices=4, heads=2, groups=2, layout=ZIGZAG),
    Case(devices=4, window=7, segments=True),
    Case(devices=2, mode="all_to_all", window=37, segments=True),
    Case(devices=4, mode="all_gather", alibi=True, segments=True),
)
# Each kind of mask, rows, layout and exchange; with PAIRS they have every two properties of the matrix together.
CASES = (
    *EACH_DAY,
    Case(devices=2, head_dim=16, segments=True),
    Case(devices=4, causal=False, groups=4, segments=True),
    Case(devices=4, packed=False),
    Case(devices=4, heads=4, groups=1, segments=True),
    Case(devices=8, layout=ZIGZAG, segments=True),
    Case(devices=8, causal=False, heads=2, groups=1, head_dim=5),
    Case(devices=2, causal=False, layout=ZIGZAG),
    Case(devices=8, window=8, groups=4),
    Case(devices=2, window=1, head_dim=16),
    Case(devices=4, window=99),
    Case(devices=4, causal=False, window=16, heads=2, groups=1, segments=True),
    Case(devices=2, mode=None, alibi=True),
    Case(devices=4, mode="all_gather", window=37, segments=True),
    Case(devices=8, packed=False, layout=ZIGZAG, heads=2, groups=1, head_dim=16),
    Case(devices=2, packed=False, causal=False),
    Case(devices=2, packed=False, mode="all_to_all"),
    Case(devices=4, packed=False, window=9),
    Case(devices=2, packed=False, mode=None, alibi=True),
)
PAIRS = (
    Case(devices=2, mode="all_to_all", alibi=True, heads=8, groups=4),
    Case(devices=2, mode="all_gather", causal=False, window=8, groups=4, head_dim=5, packed=False),
    Case(devices=8, mode="all_gather", causal=False, window=8, heads=8, groups=1, head_dim=16),
    Case(devices=4, mode="all_to_all", causal=False, groups=4, head_dim=16),
    Case(devices=2, layout=ZIGZAG, heads=8, groups=1, head_dim=5, segments=True),
    Case(devices=4, mode="all_gather", causal=False, heads=8, groups=1, head_dim=5, packed=False),
    Case(devices=2, mode="all_to_all", window=1, groups=4, head_dim=5),
    Case(devices=8, mode="all_to_all", causal=False, window=8, heads=8, groups=8),
    Case(devices=2, window=1, heads=8, groups=1),
)


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in EACH_DAY
        else pytest.param(case, marks=pytest.mark.slow(days=28, group="rings and splits"))
        for case in CASES
    ],
    ids=str,
)
def test_equals_dense_attention(case: Case) -> None:
    check(case)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_equals_dense_attention_in_other_pairs(case: Case) -> None:
    check(case)


def matrix() -> list[Case]:
    """Return all that `CASES` and `PAIRS` stand for."""
    heads = [(h, g, d) for (h, g), d in itertools.product(((4, 4), (4, 2), (8, 1)), (8, 16, 5))]
    heads.append((8, 8, 8))
    masks = ((True, None), (False, None), (True, 1), (True, 5), (False, 8))
    cases = []
    kinds = ({}, {"segments": True}, {"packed": False})
    for n, (h, g, d), (causal, window), kind in itertools.product((2, 4, 8), heads, masks, kinds):
        case = Case(devices=n, heads=h, groups=g, head_dim=d, causal=causal, window=window, **kind)
        cases += [case] if window else [case, replace(case, layout=ZIGZAG)]
        cases.append(replace(case, mode="all_gather"))
        if g % n == 0:
            cases.append(replace(case, mode="all_to_all"))
    return cases


def pairs(cases: Iterable[Case]) -> set[Any]:
    """Every two values of two properties that some case has together."""
    found = set()
    for case in cases:
        rows = "segments" if case.segments else "whole" if case.packed else "holes"
        mask = (case.causal, case.window is not None)
        ratio = min(case.heads // case.groups, 3)
        values = (case.devices, case.mode, case.layout, mask, ratio, case.head_dim, rows)
        found |= set(itertools.combinations(enumerate(values), 2))
    return found


def test_the_cases_have_every_pair_of_the_matrix() -> None:
    assert not pairs(matrix()) - pairs((*CASES, *PAIRS))


def counts(text: str) -> dict[str, int]:
    names = ("collective-permute", "all-gather", "all-reduce", "all-to-all", "reduce-scatter")
    return {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}


@pytest.mark.slow(days=28, group="costly", turn="parallel/test_context")
@pytest.mark.parametrize(
    ("case", "permutes"),
    [
        # The swap is 2 for each of q, k, v, o and as many back; a ring has n - 1 messages and n + 1 back.
        (Case(devices=4, layout=ZIGZAG), (4 - 1) + (4 + 1)),
        (Case(devices=4), (4 - 1) + (4 + 1) + 16),
        (Case(devices=4, window=7), 2 + 2),
    ],
    ids=str,
)
def test_a_ring_gathers_nothing(case: Case, permutes: int) -> None:
    run, _ = split(case)
    mesh = mesh_of(case)
    sharding = jax.NamedSharding(mesh, jax.P("data", "seq"))
    with jax.set_mesh(mesh):
        text = run.lower(*jax.device_put(case.arrays(), sharding)).compile().as_text()
    found = counts(text)
    assert found.pop("collective-permute") <= permutes
    assert "collective-permute" in text
    assert not any(found.values()), found


def test_heads_are_exchanged_in_one_message_each_way() -> None:
    case = Case(devices=2, mode="all_to_all")
    run, _ = split(case)
    with jax.set_mesh(mesh_of(case)):
        jaxpr = str(jax.make_jaxpr(run)(*case.arrays()))
    assert jaxpr.count("all_to_all[") == 2 + 2


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("case", [Case(devices=4, layout=ZIGZAG), Case(devices=2, causal=False)], ids=str)
def test_long_stretches_equal_dense_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "MERGED_AT_ONCE", 0)
    check(case)


@pytest.mark.slow(days=28, group="rings and splits")
def test_a_ring_repeats_bit_for_bit() -> None:
    case = Case(devices=8, segments=True)
    run, _ = split(case)
    with jax.set_mesh(mesh_of(case)):
        first, second = (jax.device_get(run(*case.arrays())) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_padding_and_holes_are_not_read(mode: str, packed: bool) -> None:
    case = Case(devices=2, mode=mode, segments=packed, packed=packed)
    run, _ = split(case)
    arrays, ids = case.arrays(), case.segment_ids()
    assert ids is not None
    dirty = [np.where((ids > 0)[..., None, None], x, np.nan).astype(x.dtype) for x in arrays]
    with jax.set_mesh(mesh_of(case)):
        clean = [np.asarray(x) for x in run(*arrays)]
        got = [np.asarray(x) for x in run(*dirty)]
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(a, np.where((ids > 0)[..., None, None], b, 0))


@pytest.mark.slow(days=28, group="rings and splits")
def test_bf16_errors_do_not_grow_with_the_ring() -> None:
    case = Case(devices=2, length=128, head_dim=16)
    arrays = case.arrays(jnp.bfloat16)
    exact = dense(case, [x.astype(np.float32) for x in arrays])
    plain = passes(lambda q, k, v: attention(q, k, v, masks.CAUSAL, implementation="xla"))
    floor = [relative_error(a, b) for a, b in zip(plain(*arrays), exact, strict=True)]
    for devices in (2, 8):
        run, _ = split(replace(case, devices=devices))
        with jax.set_mesh(mesh_of(replace(case, devices=devices))):
            got = [relative_error(a, b) for a, b in zip(run(*arrays), exact, strict=True)]
        assert all(error <= 1.05 * limit for error, limit in zip(got, floor, strict=True)), (got, floor)


@pytest.mark.parametrize(
    ("change", "exchanged"),
    [
        ({"groups": 4}, "all_to_all"),
        ({"groups": 2}, "ppermute"),
        ({"groups": 4, "window": 5}, "ppermute"),
        ({"groups": 4, "layout": ZIGZAG}, "ppermute"),
        ({"groups": 4, "length": 8 * (SHORT + 1)}, "ppermute"),
        ({"groups": 2, "alibi": True, "devices": 2}, "all_to_all"),
    ],
    ids=str,
)
def test_the_mode_that_is_chosen(change: dict[str, Any], exchanged: str) -> None:
    case = replace(Case(devices=4, heads=4, mode=None), **change)
    q, k = (jax.ShapeDtypeStruct((2, case.length, n, 8), jnp.float32) for n in (case.heads, case.groups))
    with jax.set_mesh(mesh_of(case)):
        attend = partial(context_attention, layout=case.layout, **case.options())
        jaxpr = str(jax.make_jaxpr(attend)(q, k, k))
    both = ("all_to_all[", "ppermute[")
    assert [name in jaxpr for name in both] == [exchanged + "[" == name for name in both]


@pytest.mark.parametrize(("mode", "calls"), [("ring", 4), ("all_to_all", 1)])
def test_holes_leave_attention_to_cudnn(mode: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls for a device's own keys and two for the other's, and as many backward; no loop over blocks in XLA."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    case = Case(devices=2, packed=False, mode=mode, length=256, head_dim=64)
    h200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
    run, _ = split(case)
    with jax.set_mesh(mesh_of(case)), compiling_for(h200):
        text = run.trace(*case.arrays(jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == calls
    assert text.count("@__cudnn$fmhaSoftmax(") == calls


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("policy", ["full", "dots", "offload"])
def test_remat_policies_keep_what_crossed_devices(policy: Any, window: int | None) -> None:
    """The backward pass of a rematerialised layer does not repeat the ring pass for the outputs."""
    assert {SAVED_OUT, SAVED_LSE} == set(ALWAYS_SAVED)
    case = Case(devices=4, layout=CONTIGUOUS if window else ZIGZAG, window=window)

    def layer(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return context_attention(jnp.sin(q), jnp.sin(k), jnp.sin(v), layout=case.layout, **case.options())

    def kernels(fn: Callable[..., jax.Array]) -> tuple[int, int]:
        jaxpr = str(jax.make_jaxpr(lambda q, k, v, do: jax.vjp(fn, q, k, v)[1](do))(*case.arrays()))
        return jaxpr.count("ppermute["), len(re.findall(r"= exp ", jaxpr))

    with jax.set_mesh(mesh_of(case)):
        saved = kernels(jax.checkpoint(layer, policy=_policy(policy)))
        thrown = kernels(jax.checkpoint(layer))
        plain = kernels(layer)
    assert saved[1] == plain[1] < thrown[1]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case(devices=8, length=60), ["T = 60", "16 equal stretches", "pad it to 64"]),
        (Case(devices=4, length=60), ["T = 60", "8 equal stretches", "pad it to 64"]),
        (Case(devices=8, length=60, mode="all_gather"), ["T = 60", "over 8 devices", "pad it to 64"]),
        (Case(devices=4, window=17), ["window of 17", "16 tokens", "all_to_all"]),
        (Case(devices=4, mode="all_to_all"), ["4 devices", "4 query heads", "2 key heads", "ring"]),
        (Case(devices=4, alibi=True), ["ALiBi", "all_gather"]),
        (Case(devices=4, layout=ZIGZAG, window=3), ["zigzag", "window=3"]),
        (Case(devices=4, mode="ulysses"), ["'ulysses'", "all_to_all"]),
    ],
    ids=str,
)
def test_what_cannot_run_is_an_error_before_compiling(case: Case, words: list[str]) -> None:
    with jax.set_mesh(mesh_of(case)), pytest.raises(ValueError) as caught:
        jax.eval_shape(lambda q, k, v: context_attention(q, k, v, **case.split_options()), *case.arrays()[:3])
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("mode", ["ring", "all_to_all", "all_gather"])
def test_arrays_that_do_not_fit_are_an_error_in_every_mode(mode: str) -> None:
    case = Case(devices=2, mode=mode)
    q, k, v, _ = map(jnp.asarray, case.arrays())
    with jax.set_mesh(mesh_of(case)):
        for changed, words in (((k.astype(jnp.bfloat16), v), "one dtype"), ((k, v[..., :4]), "of one shape")):
            with pytest.raises(ValueError, match=words):
                context_attention(q, *changed, causal=True, mode=case.mode)


def test_without_a_split_sequence_it_says_so() -> None:
    with pytest.raises(ValueError, match="no mesh with a 'seq' axis"):
        context_attention(*map(jnp.asarray, Case(devices=2).arrays()[:3]), causal=True)


def test_one_message_carries_all_bits() -> None:
    """Any bits: the halves of fp32 numbers are NaNs, infinities and what not when read as bf16."""
    numbers = np.random.default_rng(0).integers(0, 2**32, (2, 3, 64), np.uint32)
    arrays = [
        jnp.asarray(np.arange(384.0).reshape(2, 3, 64), jnp.bfloat16),
        jnp.asarray(numbers).view(jnp.float32),
    ]
    for given in (arrays, arrays[1:], arrays[:1]):
        packed = _pack(given)
        assert packed.nbytes == sum(x.nbytes for x in given)
        for got, want in zip(_unpack(packed, given), given, strict=True):
            assert got.dtype == want.dtype
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
