"""Packed rows in a ring by lengths equal dense attention, in values and gradients, whichever way the devices take."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxblt.models.remat import _policy
from jaxblt.parallel.attention import packed_ring, plan
from jaxblt.parallel.attention.context import context_attention
from jaxblt.parallel.attention.plan import Plan
from jaxblt.parallel.layout import CONTIGUOUS, ZIGZAG
from jaxblt.parallel.sequence import SeqAxis, over_sequence
from pallas_kernels import _compat
from pallas_kernels._dispatch import compiling_for, record_choices
from pallas_kernels.attention import Partial, cudnn
from tests.pallas_kernels.attention import dense_kernel
from tests.pallas_kernels.attention.test_packed import emulate, row_of
from tests.parallel.test_context import Case, check, dense, mesh_of, split
from tests.sampled import thinned
from tests.tolerances import assert_close, assert_norms_close

H200 = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
A100 = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@dataclass(frozen=True, kw_only=True)
class Packed(Case):
    """Anything where no token is."""

    documents: tuple[str, str]
    segments: bool = True
    implementation: Any = None

    def __str__(self) -> str:
        return "_".join((*self.documents, super().__str__()))

    def split_options(self) -> dict[str, Any]:
        return super().split_options() | {"implementation": self.implementation}

    def arrays(self, dtype: Any = np.float32) -> list[np.ndarray]:
        ids = np.asarray(self.segment_ids())
        return [np.where((ids > 0)[..., None, None], x, np.nan).astype(dtype) for x in super().arrays()]

    def segment_ids(self) -> jax.Array:
        rows = [row_by_name(name, self.length, self.length // (2 * self.devices)) for name in self.documents]
        return jnp.asarray(np.stack(rows), jnp.int32)


def row_by_name(name: str, n: int, stretch: int) -> np.ndarray:
    """Ids of n tokens; a device has two stretches."""
    rng, place = np.random.default_rng(n), np.arange(n)
    if name == "padded":
        # Nothing, some of a document, holes, more of it, nothing.
        found = np.ones(n, np.int32)
        found[: stretch + 1] = found[-stretch:] = 0
        found[n // 2 : n // 2 + stretch] = -1
        return found
    if name == "holes":
        found = row_of([stretch + 1, 2 * stretch, n], n)
        return np.where(rng.random(n) < 0.4, -found, found)
    return {
        # over one edge, three, and as many as are left
        "crossing": row_of([stretch // 2, stretch, 3 * stretch, n], n),
        "one": np.ones(n, np.int32),
        "inside": row_of(rng.integers(1, stretch, n), n),
        "random": row_of(rng.geometric(2 / n, n), n, 2),
        "twice": np.where(place // (n // 4) % 2 == 0, 1, 2),
    }[name]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if cuDNN were there; what runs is XLA."""
    monkeypatch.setattr(plan, "can_run_on_cudnn", lambda *_: True)


def poison(monkeypatch: pytest.MonkeyPatch, *, between: bool) -> None:
    """NaN from the ring that sends keys `between` different runs alone, or from the other."""
    attend, gradients = packed_ring.partial_ring_attention, packed_ring.ring_gradients

    def poisoned_attention(*args: Any, **options: bool) -> Partial:
        if options.get("between", False) == between:
            return Partial(jnp.nan * args[1], jnp.nan * args[1][..., 0].swapaxes(1, 2))
        return attend(*args, **options)

    def poisoned_gradients(*args: Any, **options: bool) -> Any:
        if options.get("between", False) == between:
            return tuple(jnp.nan * x for x in (args[1], args[2].k, args[2].v))
        return gradients(*args, **options)

    monkeypatch.setattr(packed_ring, "partial_ring_attention", poisoned_attention)
    monkeypatch.setattr(packed_ring, "ring_gradients", poisoned_gradients)


CASES = (
    Packed(devices=4, documents=("holes", "one"), layout=ZIGZAG, head_dim=5),
    Packed(devices=8, documents=("padded", "inside"), heads=2, groups=1, length=80),
)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rising_ids(case: Packed, chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, between=False)
    check(case)


def test_other_ids(chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row rises: its devices have to go the same way as the others."""
    poison(monkeypatch, between=True)
    check(Packed(devices=2, documents=("twice", "crossing")))


def matrix() -> list[Packed]:
    heads, layouts, lengths = ((4, 4, 8), (4, 2, 16), (8, 1, 5)), (CONTIGUOUS, ZIGZAG), (64, 144)
    rows = (("crossing", "one"), ("inside", "padded"), ("holes", "random"), ("random", "twice"))
    return [
        Packed(devices=n, heads=h, groups=g, head_dim=d, layout=layout, length=length, documents=documents)
        for n, (h, g, d), layout, length, documents in itertools.product(
            (2, 4, 8), heads, layouts, lengths, rows
        )
    ]


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("case", thinned(matrix(), 28, astuple), ids=str)
def test_pairs_of_the_full_matrix(case: Packed, chosen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, between="twice" in case.documents)
    check(case)


@pytest.mark.parametrize("layout", [CONTIGUOUS, ZIGZAG], ids=lambda x: x.kind)
def test_whether_documents_rise(layout: Any) -> None:
    """Of runs with their content first, against a loop over the rows."""
    ring, rng = Plan("ring", axis=SeqAxis("seq", 4), layout=layout), np.random.default_rng(0)

    def rise(ids: Any) -> Any:
        both = lambda ids, *_: jnp.full(ids.shape, packed_ring.documents_rise(ring, ids))  # noqa: E731
        return over_sequence(both, ids)

    found = []
    with jax.set_mesh(mesh_of(Case(devices=4))):
        run = jax.jit(rise)
        for _ in range(40):
            counts = rng.integers(0, 5, (2, 4 * ring.runs, 1))
            ids = np.sort(rng.integers(1, 9, (2, 16 * ring.runs)), 1).reshape(2, -1, 4)
            ids = np.where(np.arange(4) < counts, ids, 0)
            ids[rng.random(ids.shape) < 0.02] *= 2
            rows = [row[row > 0] for row in ids.reshape(2, -1)]
            got = np.asarray(run(ids.reshape(2, -1)[:, layout.order(16 * ring.runs, 4)]))
            found.append(all((np.diff(row) >= 0).all() for row in rows))
            assert (got == found[-1]).all()
    assert 0 < sum(found) < len(found)


def taken(jaxpr: Any) -> Iterator[str]:
    """Names of the operations where every condition holds."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        inner = eqn.params["branches"][-1:] if eqn.primitive.name == "cond" else eqn.params.values()
        for x in inner:
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield from taken(x)


@pytest.mark.slow(days=28, group="rings and splits")
@pytest.mark.parametrize("implementation", ["cudnn", None])
def test_cudnn_alone_attends(implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for a device's own runs, one for its later run to its earlier one, and two for the other's keys."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    case = Packed(devices=2, documents=("crossing", "one"), length=256, head_dim=64)
    run, _ = split(replace(case, implementation=implementation))
    with jax.set_mesh(mesh_of(case)), compiling_for(H200):
        traced = run.trace(*case.arrays(jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = list(taken(traced.jaxpr.jaxpr))
    assert names.count("dot_product_attention_fwd") + names.count("dot_product_attention_fwd_wrapper") == 4
    assert "dot_general" not in names
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 4


@pytest.mark.slow(days=28, group="rings and splits")
def test_with_what_cudnn_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its calls, with NaN outside of the documents and beyond the lengths."""
    emulate(monkeypatch)
    monkeypatch.setattr(_compat, "cudnn_attention", dense_kernel.attention)
    monkeypatch.setattr(_compat, "cudnn_attention_gradients", dense_kernel.gradients)
    monkeypatch.setattr(cudnn, "why_not", lambda *_, **__: None)
    poison(monkeypatch, between=False)
    with compiling_for(H200):
        documents = ("crossing", "random")
        check(Packed(devices=2, documents=documents, groups=1, length=36, implementation="cudnn"))


def asked(change: dict[str, Any]) -> bool:
    given = {"causal": True, "implementation": "cudnn", "dtype": jnp.bfloat16, "length": 128} | change
    q = jax.ShapeDtypeStruct((1, given.pop("length"), 2, 64), given.pop("dtype"))
    with compiling_for(given.pop("device", H200)):
        return plan.can_run_on_cudnn(Plan("ring", axis=SeqAxis("seq", 4), layout=ZIGZAG, **given), q, q)


@pytest.mark.parametrize("implementation", ["cudnn", "xla", None])
def test_what_runs_on_cudnn(implementation: Any) -> None:
    assert asked({"implementation": implementation}) == (implementation != "xla")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"causal": False}, "later documents"),
        ({"dtype": jnp.float32}, "bfloat16 and float16 alone"),
        ({"length": 2**24}, "scratch would be"),
        ({"device": A100}, "need compute capability 9.0"),
        ({"device": CPU}, "need compute capability 9.0"),
    ],
    ids=str,
)
def test_what_cannot_go_to_cudnn(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*; use implementation=None, or packed=False"):
        asked(change)
    assert not asked(change | {"implementation": None})


@pytest.mark.parametrize("change", [{"causal": False}, {"window": 16}], ids=str)
def test_what_has_no_form_by_lengths_runs_on_xla(change: dict[str, Any]) -> None:
    case = Packed(devices=2, documents=("crossing", "one"), length=256, head_dim=64, **change)
    run, _ = split(case)
    with jax.set_mesh(mesh_of(case)), compiling_for(H200), record_choices() as chosen:
        traced = run.trace(*case.arrays(jnp.bfloat16))
    assert "cond[" not in str(traced.jaxpr)
    assert chosen
    assert all(
        line.startswith(("partial_attention: xla", "partial_attention_backward: xla")) for line in chosen
    ), chosen


@pytest.mark.slow(days=28, group="rings and splits")
def test_remat_repeats_no_ring_pass(chosen: None) -> None:
    case = Packed(devices=2, documents=("crossing", "one"), layout=ZIGZAG)
    ids = case.segment_ids()

    def layer(*arrays: jax.Array) -> jax.Array:
        return context_attention(*map(jnp.sin, arrays), ids, **case.split_options())

    def hops(fn: Callable[..., jax.Array]) -> int:
        jaxpr = str(jax.make_jaxpr(lambda q, k, v, do: jax.vjp(fn, q, k, v)[1](do))(*case.arrays()))
        return jaxpr.count("ppermute[")

    with jax.set_mesh(mesh_of(case)):
        saved, thrown = hops(jax.checkpoint(layer, policy=_policy("full"))), hops(jax.checkpoint(layer))
        assert saved == hops(layer) < thrown


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("documents", [("crossing", "holes"), ("twice", "crossing")])
def test_equals_dense_attention_on_gpus(documents: tuple[str, str]) -> None:
    """Two rows over two GPUs; gradients of a row by their norm."""
    case = Packed(devices=2, documents=documents, length=4096, head_dim=64, implementation="cudnn")
    arrays, (run, _) = case.arrays(jnp.bfloat16), split(case)
    with jax.set_mesh(mesh_of(case)):
        o, *gradients = (np.asarray(x, np.float32) for x in run(*arrays))
    want, *expected = dense(case, [x.astype(np.float32) for x in arrays])
    assert_close(o, want, jnp.bfloat16, case.length, "values")
    for name, got, like in zip("qkv", gradients, expected, strict=True):
        assert_norms_close(got, like, range(2), jnp.bfloat16, case.length, f"gradient of {name}")
