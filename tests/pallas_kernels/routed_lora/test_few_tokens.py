"""Calls with a small W: two products for few tokens, no pass that adds an update for many, and what others give."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routed_lora import routed_lora, xla
from pallas_kernels.routed_lora.reference import routed_lora_reference
from tests.pallas_kernels import op_suite
from tests.pallas_kernels.routed_lora.test_routed_lora import K, _case, arrays, matrices


def products(tokens: int, width: int, sites: int = 3) -> int:
    """Products of a forward pass in bf16."""
    x = jax.ShapeDtypeStruct((1, tokens, width), jnp.bfloat16)
    w, v, u = (
        tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(sites))
        for shape in ((width, 512), (width, 16), (16, 512))
    )
    code = jax.ShapeDtypeStruct((1, tokens, 16), jnp.float32)

    def run(*args: Any) -> Any:
        return routed_lora(*args, implementation="xla")

    return str(jax.make_jaxpr(run)(x, w, v, u, code)).count("dot_general[")


@pytest.mark.parametrize(
    ("tokens", "width", "count"),
    [(1, 512, 2), (4096, 512, 2), (32_768, 512, 4), (32_768, 2048, 7), (1, 8192, 7)],
    ids=["one token", "few tokens", "many tokens", "narrow outputs", "a large weight"],
)
def test_small_weights_are_copied_to_save_products(tokens: int, width: int, count: int) -> None:
    assert products(tokens, width) == count


def test_products_in_fp32_are_those_of_the_base() -> None:
    """Where U or the code is 0, y is the base's bit for bit."""
    given = arrays()
    base = jax.jit(lambda x, w: [jnp.einsum("btk,kn->btn", x, each) for each in w])
    for name in ("u", "code"):
        found, w = without(name, given)
        for ours, theirs in zip(found, base(given["x"], w), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_update_of_zero_adds_nothing() -> None:
    given = arrays(dtype=jnp.bfloat16)
    for ours, theirs in zip(without("u", given)[0], without("code", given)[0], strict=True):
        np.testing.assert_array_equal(ours.astype(jnp.float32), theirs.astype(jnp.float32))


@jax.jit
def _call(given: dict[str, Any]) -> Any:
    return routed_lora(given["x"], *matrices(given), given["code"])


def without(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """y where the arrays of a name are 0, and W."""
    still = {key: jnp.zeros_like(a) if key.startswith(name) else a for key, a in given.items()}
    return _call(still), matrices(given)[0]


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize(
    "most",
    [{}, {"MERGED": 0}, {"COPIED": 0}],
    ids=["few tokens", "many tokens", "a large weight"],
)
@pytest.mark.parametrize("count", [1, 0], ids=["code", "static"])
@pytest.mark.parametrize("channels_first", [False, True], ids=["rows", "channels first"])
def test_all_ways_are_the_reference(
    most: dict[str, int], count: int, channels_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in most.items():
        monkeypatch.setattr(xla, name, size)
    given = {name: a for name, a in arrays(dtype=jnp.bfloat16).items() if count or name != "code"}
    op_suite.check_reference(_case("bfloat16", given, channels_first=channels_first))


@pytest.mark.slow(days=28, group="properties of kernels")
@pytest.mark.parametrize("most", [xla.COPIED, 0], ids=["small", "large"])
@pytest.mark.parametrize(("site", "count"), [(1, 1), (1, 0), (2, 1)], ids=["narrow", "static", "wide"])
@pytest.mark.parametrize("channels_first", [False, True], ids=["rows", "channels first"])
def test_one_site_is_the_reference(
    most: int, site: int, count: int, channels_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward, its update is added by the product if y is narrower than x, or is in W without a code."""
    monkeypatch.setattr(xla, "COPIED", most)
    drawn = arrays(dtype=jnp.bfloat16) | {
        "w2": jnp.ones((K, 9), jnp.bfloat16),
        "v2": jnp.ones((K, 4), jnp.bfloat16),
        "u2": jnp.ones((4, 9), jnp.bfloat16),
    }
    names = {"x", *(["code"] if count else []), *(f"{name}{site}" for name in "wvu")}
    given = {name: drawn[name] for name in names}
    case = op_suite.OpCase(
        name="one site",
        run=partial(_one, routed_lora, site, channels_first),
        reference=partial(_one, routed_lora_reference, site, channels_first),
        arrays=given,
        shared=frozenset(given) - {"x", "code"},
        terms=K + 8,
        grad_terms=56,
    )
    op_suite.check_reference(case)


def _one(call: Any, site: int, channels_first: bool, given: dict[str, Any]) -> Any:
    w, v, u = ((given[f"{name}{site}"],) for name in "wvu")
    options: dict[str, Any] = {"chunk": 1, "scale": 0.5, "channels_first": channels_first}
    return call(given["x"], w, v, u, given.get("code"), **options)
