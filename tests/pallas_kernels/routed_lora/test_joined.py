"""Matrices of a group joined once: what the op gives without, by one product."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._dispatch import reference_ops
from pallas_kernels.routed_lora import can_join, join, multiply_joined, routed_lora
from pallas_kernels.routed_lora.joined import SUMMED
from tests.pallas_kernels.routed_lora.test_routed_lora import K, arrays, matrices
from tests.tolerances import assert_close

SCALE = 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("blocks", [4, 1, 0])
@pytest.mark.parametrize("length", [1, 7])
def test_joined_matrices_give_what_the_op_gives(dtype: str, blocks: int, length: int) -> None:
    given = arrays(length=length, blocks=max(blocks, 1), dtype=dtype)
    code = given["code"] if blocks else None

    @jax.jit
    def both(given: dict[str, Any], code: Any) -> Any:
        joined = join(*matrices(given), scale=SCALE, dtype=dtype, coded=code is not None)
        wide = {name: array.astype(jnp.float32) for name, array in given.items()}
        expected = routed_lora(wide["x"], *matrices(wide), code, scale=SCALE, implementation="reference")
        return multiply_joined(given["x"], joined, code), expected

    for ours, theirs in zip(*both(given, code), strict=True):
        assert ours.dtype == jnp.dtype(dtype)
        assert_close(ours, theirs.astype(dtype), n=K + 8)


def test_ranks_are_summed_a_few_at_a_time() -> None:
    rank, rng = 2 * SUMMED + 4, np.random.default_rng(0)
    shapes = (2, 1, K), (2, 1, 4), (K, 5), (K, rank), (rank, 5)
    x, code, *sites = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    w, v, u = ((site,) for site in sites)

    def call(x: Any) -> Any:
        return multiply_joined(x, join(w, v, u, scale=SCALE, dtype=x.dtype, coded=True), code)

    assert str(jax.make_jaxpr(call)(x)).count("reduce_sum") == 3
    expected = routed_lora(x, w, v, u, code, scale=SCALE, implementation="reference")
    assert_close(jax.jit(call)(x)[0], expected[0], n=K + rank)


@pytest.mark.parametrize("coded", [True, False])
def test_a_call_has_one_product_and_copies_no_weight(coded: bool) -> None:
    given = arrays(length=1, dtype=jnp.bfloat16)
    joined = jax.eval_shape(partial(join, scale=SCALE, dtype=jnp.bfloat16, coded=coded), *matrices(given))
    jaxpr = str(jax.make_jaxpr(multiply_joined)(given["x"], joined, given["code"] if coded else None))
    assert jaxpr.count("dot_general[") == 1
    assert "concatenate" not in jaxpr


@pytest.mark.parametrize("coded", [True, False])
def test_matrices_of_other_calls_are_refused(coded: bool) -> None:
    given = arrays(dtype=jnp.bfloat16)
    joined = join(*matrices(given), scale=SCALE, dtype=jnp.bfloat16, coded=coded)
    with pytest.raises(ValueError, match=f"joined with coded={coded}: join them for such calls"):
        multiply_joined(given["x"], joined, None if coded else given["code"])


@pytest.mark.parametrize(
    ("dtype", "tokens", "width", "can"),
    [
        ("bfloat16", 64, 512, True),
        ("bfloat16", 32_768, 512, False),
        ("bfloat16", 1, 8192, False),
        ("float32", 1, 512, False),
    ],
    ids=["few tokens", "many tokens", "a large weight", "fp32"],
)
def test_where_joining_saves_a_copy(dtype: str, tokens: int, width: int, can: bool) -> None:
    x = jax.ShapeDtypeStruct((tokens, 1, width), dtype)
    w = (jax.ShapeDtypeStruct((width, 1024), dtype),)
    assert can_join(x, w) is can
    with reference_ops():
        assert not can_join(x, w)
