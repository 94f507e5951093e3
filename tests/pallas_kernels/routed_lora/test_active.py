"""Blocks that are not active: which they are, that they count as a code of 0, and which calls are refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.routed_lora import active_blocks, routed_lora
from pallas_kernels.routed_lora.grid import Term
from pallas_kernels.routed_lora.reference import routed_lora_reference
from pallas_kernels.routed_lora.steps import active_steps, listed
from tests.pallas_kernels import op_suite
from tests.tolerances import assert_close

ROWS, LENGTH, K, CHUNK, BLOCKS = 8, 256, 6, 100, 4
"""Rows are tiles, so that devices with a row each have the same tiles."""


def arrays(seed: int = 0) -> dict[str, Any]:
    """One block of each row has a code; in row 0 chunk 1 alone."""
    rng = np.random.default_rng(seed)
    sizes = {"x": (ROWS, LENGTH, K), "w": (K, 5), "v": (K, 8), "u": (8, 5), "code": (ROWS, 3, BLOCKS)}
    found = {name: rng.standard_normal(size, np.float32) for name, size in sizes.items()}
    found["code"] *= np.arange(BLOCKS) == np.arange(ROWS)[:, None, None] % BLOCKS
    found["code"][0, [0, 2]] = 0
    return {name: jax.device_put(array) for name, array in found.items()}


def run(call: Any, x: dict[str, Any], *, derived: bool = True, **more: Any) -> Any:
    options: dict[str, Any] = {"chunk": CHUNK, "scale": 0.5, **more}
    if derived:
        options["active"] = active_blocks(x["code"], LENGTH, chunk=CHUNK)
    return call(x["x"], (x["w"],), (x["v"],), (x["u"],), x["code"], **options)


CASE = op_suite.OpCase(
    name="active",
    run=partial(run, routed_lora),
    reference=partial(run, routed_lora_reference),
    arrays=arrays(),
    shared=frozenset("wvu"),
    terms=K + 8,
    grad_terms=ROWS * LENGTH,
)


@pytest.mark.slow(days=28, group="properties of kernels", every="reference")
@pytest.mark.parametrize("check", [name for name in op_suite.CHECKS if name != "poison"])
def test_properties(check: str) -> None:
    op_suite.CHECKS[check](CASE)


def test_channels_first() -> None:
    runs = {
        name: partial(run, call, channels_first=True)
        for name, call in (("run", routed_lora), ("reference", routed_lora_reference))
    }
    op_suite.check_reference(replace(CASE, **runs))


def test_values_and_gradients_are_as_without_it() -> None:
    """Those of the code too, where it is 0."""
    y, found = op_suite.value_and_grads(CASE.run, CASE.arrays)
    plain, expected = op_suite.value_and_grads(partial(run, routed_lora, derived=False), CASE.arrays)
    assert_close(y[0], plain[0], n=K + 8)
    assert np.all(np.asarray(expected["code"]))
    for name in CASE.arrays:
        assert_close(found[name], expected[name], n=ROWS * LENGTH)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_block_that_is_not_active_counts_as_0(implementation: Any) -> None:
    """Three tiles of two rows: block 0 only in the middle one, which has tokens of both."""
    x = {name: array[:2] if name in ("x", "code") else array for name, array in arrays().items()}
    x["x"], x["code"] = (jnp.tile(x["x"], (1, 2, 1))[:, :300], jnp.ones((2, 300, BLOCKS)))
    active = np.zeros((3, BLOCKS), bool)
    active[1, 0] = True
    kept = np.zeros((600, BLOCKS), np.float32)
    kept[256:512, 0] = 1
    call = partial(routed_lora, x["x"], x["w"], x["v"], x["u"], implementation=implementation)
    found = call(x["code"], active=jnp.asarray(active))
    assert_close(found, call(jnp.asarray(kept.reshape(2, 300, BLOCKS))), n=K + 8)


def test_active_blocks_of_a_code() -> None:
    """Of tokens in the order of rows, whole chunks of a row or not; a number that is not finite counts."""
    code = np.zeros((3, 2, 2), np.float32)
    code[0, 1, 0], code[2, 0, 1] = 1, np.nan
    # Chunk 1 of row 0 has the tokens 150 to 199, chunk 0 of row 2 the tokens 400 to 549.
    found = active_blocks(jnp.asarray(code), 200, chunk=150)
    assert found.tolist() == [[True, False], [False, True], [False, True]]


def test_steps_of_a_tile() -> None:
    """Sites of 3 x 16 and 3 x 32 ranks: step 0 has all of the first and half a block, step 1 half, one and one."""
    active = np.array([[False, False, True], [False, True, False], [False, False, False]])
    steps = jax.jit(lambda active: active_steps(active, [48, 96]))(active)
    assert steps.tolist() == [[True, True, True], [True, True, False], [False] * 3]
    found = jax.jit(lambda steps: listed(steps, [Term(0, 0, 0, 64), Term(0, 0, 64, 128)]))(steps)
    assert found.counts.tolist() == [[1, 2], [1, 1], [0, 0]]
    assert found.order.tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    some = np.array([[False, True, False, True, True]])
    found = jax.jit(lambda steps: listed(steps, [Term(0, 0, 0, 320)]))(some)
    assert found.order.tolist() == [[1, 3, 4, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": None}, r"active \(8, 4\) without a code, where every block counts 1: leave active out"),
        (
            {"active": jnp.ones((8, 4))},
            "active must be booleans, got float32: make it of the code by active_blocks",
        ),
        (
            {"active": jnp.ones((8, 3), bool)},
            r"active must be \[8, 4\] for 2048 tokens in tiles of 256 and 4 blocks, got \(8, 3\): make it",
        ),
        ({"active": jnp.ones((4,), bool)}, r"active must be \[8, 4\] .* got \(4,\)"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    x = arrays()
    given = x | {"active": jnp.ones((8, 4), bool), "chunk": CHUNK}
    with pytest.raises(ValueError, match=message) as caught:
        routed_lora(**given | change)
    assert "\n" not in str(caught.value)
