"""Products with a routed low-rank update: values and gradients against the textbook, and what is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._bench import check
from pallas_kernels.routed_lora import bench, routed_lora, xla
from pallas_kernels.routed_lora.reference import routed_lora_reference
from pallas_kernels.routed_lora.shapes import RoutedLoraShape
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close

K = 6
SITES = ((5, 4), (3, 8))
"""Outputs and rank of the sites of a group."""


def arrays(
    *, batch: int = 8, length: int = 7, chunk: int = 1, blocks: int = 4, dtype: Any = jnp.float32
) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: Any = dtype) -> Any:
        return jax.device_put(rng.standard_normal(shape).astype(dtype))

    found = {"x": draw(batch, length, K), "code": draw(batch, -(-length // chunk), blocks, dtype=jnp.float32)}
    for i, (outputs, rank) in enumerate(SITES):
        found |= {f"w{i}": draw(K, outputs), f"v{i}": draw(K, rank), f"u{i}": draw(rank, outputs)}
    return found


def matrices(given: dict[str, Any]) -> tuple[Any, Any, Any]:
    w, v, u = (tuple(given[f"{name}{i}"] for i in range(len(SITES))) for name in "wvu")
    return w, v, u


def _case(
    name: str, given: dict[str, Any], *, chunk: int = 1, channels_first: bool = False
) -> op_suite.OpCase:
    options: dict[str, Any] = {"chunk": chunk, "scale": 0.5, "channels_first": channels_first}
    shared = frozenset(given) - {"x", "code"}
    rows, length, _ = given["x"].shape

    def run(call: Any, x: Any) -> Any:
        return call(x["x"], *matrices(x), x.get("code"), **options)

    return op_suite.OpCase(
        name=name,
        run=partial(run, routed_lora),
        reference=partial(run, routed_lora_reference),
        arrays=given,
        shared=shared,
        terms=K + 8,
        grad_terms=rows * length,
    )


STATIC = {name: array for name, array in arrays().items() if name != "code"}
CASES = [
    _case("chunks_of_3", arrays(chunk=3), chunk=3),
    _case("tokens_bfloat16", arrays(dtype=jnp.bfloat16)),
    _case("channels_first", arrays(chunk=3), chunk=3, channels_first=True),
    _case("channels_first_bfloat16", arrays(dtype=jnp.bfloat16), channels_first=True),
]


@pytest.mark.slow(days=28, group="properties of kernels", every="*-reference")
@pytest.mark.parametrize("check", [name for name in op_suite.CHECKS if name != "poison"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_properties(case: op_suite.OpCase, check: str) -> None:
    op_suite.CHECKS[check](case)


def test_without_a_code() -> None:
    op_suite.check_reference(_case("static", STATIC))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("weighed", [True, False])
def test_channels_first_is_the_transposition(weighed: bool, implementation: Any) -> None:
    """Values, and gradients of transposed cotangents."""
    x = arrays(chunk=3)
    w, v, u = matrices(x)
    call = partial(routed_lora, chunk=3, scale=0.5, implementation=implementation)

    @jax.jit
    def both(x: Any, v: Any, u: Any, code: Any) -> Any:
        def run(order: bool, *given: Any) -> Any:
            first, down, up, numbers = given
            return call(first, w if weighed else None, down, up, numbers, channels_first=order)

        y, back = jax.vjp(partial(run, False), x, v, u, code)
        turned, back_turned = jax.vjp(partial(run, True), x, v, u, code)
        cotangents = jax.tree.map(jnp.sin, y)
        return (y, back(cotangents)), (
            jax.tree.map(lambda a: a.swapaxes(1, 2), turned),
            back_turned(jax.tree.map(lambda a: a.swapaxes(1, 2), cotangents)),
        )

    expected, found = both(x["x"], v, u, x["code"])
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(ours, theirs, n=56)


def test_the_update_alone() -> None:
    x = {"x": arrays()["x"], "code": arrays()["code"], "v": arrays()["v0"], "u": arrays()["u0"]}
    run = partial(_alone, routed_lora)
    case = op_suite.OpCase(
        name="alone",
        run=run,
        reference=partial(_alone, routed_lora, implementation="reference"),
        arrays=x,
        shared=frozenset("vu"),
        terms=K + 4,
        grad_terms=56,
    )
    op_suite.check_reference(case)
    whole = routed_lora(x["x"], arrays()["w0"], x["v"], x["u"], x["code"], scale=0.5)
    assert_close(run(x) + x["x"] @ arrays()["w0"], whole, n=K + 4)


def _alone(call: Any, x: Any, **options: Any) -> Any:
    return call(x["x"], None, x["v"], x["u"], x["code"], scale=0.5, **options)


def test_one_site_is_an_array() -> None:
    x = arrays()
    y = routed_lora(x["x"], x["w0"], x["v0"], x["u0"], x["code"], scale=2.0)
    c = np.asarray(x["code"])
    expected = x["x"] @ x["w0"] + 2.0 * ((x["x"] @ x["v0"]) * c) @ x["u0"]
    assert_close(y, expected, n=K + 4)


def test_only_what_is_asked_for_is_computed() -> None:
    """A frozen base costs no gradient of its weights: the products of a step are counted."""
    x = arrays()

    def loss(trained: Any, names: tuple[str, ...]) -> Any:
        given = {**x, **dict(zip(names, trained, strict=True))}
        return sum(jnp.sum(y * y) for y in routed_lora(given["x"], *matrices(given), given["code"]))

    def products(*names: str) -> int:
        step = jax.jit(jax.grad(partial(loss, names=names)))
        return step.lower(tuple(x[name] for name in names)).compile().as_text().count(" dot(")

    adapter = ("v0", "u0", "v1", "u1")
    assert products(*adapter) <= products(*adapter, "w0", "w1") - 2


def test_no_array_as_large_as_tokens_is_wide() -> None:
    """In bf16 no product is asked for in fp32 that is as large as x or y: XLA would write it so."""
    x = arrays(dtype=jnp.bfloat16)
    given = (x["x"], *matrices(x), x["code"])

    def step(given: Any) -> Any:
        y, back = jax.vjp(partial(routed_lora, implementation="xla"), *given)
        return y, back(y)

    text = str(jax.make_jaxpr(step)(given))
    assert "bf16[8,7,5]" in text
    assert not [size for size in (K, 5, 3) if f"f32[8,7,{size}]" in text]


@pytest.mark.parametrize("most", [{}, {"MERGED": 0}, {"COPIED": 0}], ids=["few", "many", "large"])
def test_channels_first_transposes_only_ranks(most: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither y nor dy; the two sites have 4 and 8 ranks."""
    for name, size in most.items():
        monkeypatch.setattr(xla, name, size)
    x = arrays(dtype=jnp.bfloat16)
    w, *rest = matrices(x)

    def step(x: Any, v: Any, u: Any, code: Any) -> Any:
        op = partial(routed_lora, channels_first=True, implementation="xla")
        y, back = jax.vjp(lambda x, v, u, code: op(x, w, v, u, code), x, v, u, code)
        return y, back(y)

    text = str(jax.make_jaxpr(step)(x["x"], *rest, x["code"]))
    assert "bf16[8,5,7]" in text
    shapes = [line.split(":", 1)[1].split(" = ")[0] for line in text.splitlines() if "= transpose[" in line]
    assert set(shapes) <= {"bf16[8,7,12]", "bf16[8,12,7]"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": jnp.ones((K, 5), jnp.int32)}, "expected floats, got an array of int32"),
        ({"u": jnp.ones((3, 5))}, r"got \[\(6, 5\), \(6, 4\), \(3, 5\)\]"),
        ({"w": jnp.ones((5, 5))}, "with K = 6"),
        ({"x": jnp.ones((7, K))}, r"expected x \[B, T, K\]"),
        ({"w": (jnp.ones((K, 5)),) * 2}, r"got x .* and \[2, 1, 1\] matrices"),
        ({"code": jnp.ones((8, 6, 4))}, r"code must be \[8, 7, 'E'\] .* in chunks of 1, got \(8, 6, 4\)"),
        ({"code": jnp.ones((8, 7, 3))}, "rank of 4 does not divide into the 3 blocks"),
        ({"code": jnp.ones((8, 7, 0))}, r"code \(8, 7, 0\) has no block: give it at least one number"),
        (
            {"v": jnp.ones((K, 0)), "u": jnp.ones((0, 24)), "w": jnp.ones((K, 24))},
            "have a rank of 0: use one of at least 1",
        ),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"implementation": "mosaic_gpu"}, "'mosaic_gpu' cannot run here: .* this is cpu"),
        ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    x = arrays()
    given = {"x": x["x"], "w": x["w0"], "v": x["v0"], "u": x["u0"], "code": x["code"]}
    with pytest.raises(ValueError, match=message) as caught:
        routed_lora(**{**given, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_passes_its_gate() -> None:
    plan = bench.plan(RoutedLoraShape("tiny", 2, 8, 16, 12, 2, 4, 4, 2))
    assert set(check(plan, jax.random.key(0))) == {"plain", "xla"}
    assert [case.name for case in plan.bare] == ["matmul", "joined"]


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_with_channels_first_passes_its_gate() -> None:
    plan = bench.plan(RoutedLoraShape("tiny", 2, 8, 16, 12, 2, 4, 4, 2, channels_first=True))
    assert set(check(plan, jax.random.key(0))) == {"plain", "xla", "transposed"}
    assert [case.name for case in plan.bare] == ["matmul", "row_by_row"]


ROWS = RoutedLoraShape("tiny", 3, 256, 16, 12, 1, 8, 256, 4, 1)


@pytest.mark.slow(days=28, group="simulated kernels")
def test_the_benchmark_of_zeros_passes_its_gate() -> None:
    assert set(check(bench.plan(ROWS), jax.random.key(0))) == {"plain", "xla", "dense"}


@pytest.mark.slow(days=28, group="pages and gates of benchmarks")
def test_the_benchmark_of_zeros_counts_no_work_for_them() -> None:
    found, whole = (bench.plan(shape) for shape in (ROWS, replace(ROWS, active=None)))
    assert jnp.count_nonzero(found.plain.args[-1], axis=-1).tolist() == [[1]] * 3
    saved = whole.work["forward"].flops - found.work["forward"].flops
    assert saved == 2 * 768 * 6 * (16 + 12)
