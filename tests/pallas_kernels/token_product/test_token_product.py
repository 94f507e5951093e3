"""Products of a few tokens: each implementation against the definition, by what stands before and behind them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_product import api, reference, token_product, triton_gpu, xla
from pallas_kernels.token_product.bench import plan
from pallas_kernels.token_product.shapes import TokenShape
from tests.tolerances import assert_close

SMALL = {
    "several": TokenShape("several", 3, 72, (40, 24, 8)),
    "gated": TokenShape("gated", 1, 40, (24, 24), gated=True),
    "added": TokenShape("added", 20, 32, (48,), normed=False, added=True),
}


def arrays(shape: TokenShape) -> tuple[Any, dict[str, Any]]:
    case = plan(shape, interpret=True).truth
    return case.args, {"gated": shape.gated}


@pytest.mark.parametrize("shape", SMALL.values(), ids=SMALL)
def test_implementations_compute_the_definition(shape: TokenShape) -> None:
    given, options = arrays(shape)
    kept = jnp.arange(shape.tokens) % 2 == 0
    exact = reference.token_product(*given, kept, dtype=jnp.float32, **options)
    for run in (partial(triton_gpu.token_product, interpret=True), xla.token_product):
        found = run(*given, kept, **options)
        for y, truth in zip(found, exact, strict=True):
            assert y.dtype == jnp.bfloat16
            # Steps are rounded: the product, the gate, the sum
            assert_close(y, np.asarray(truth), n=4 * shape.dim)


def test_rows_do_not_depend_on_each_other() -> None:
    given, _ = arrays(SMALL["several"])
    run = partial(triton_gpu.token_product, interpret=True)
    x, others = given[0], given[1:]
    for together, alone in zip(run(x, *others), run(x[1:2], *others), strict=True):
        np.testing.assert_array_equal(together[1:2], alone)


def test_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(triton_gpu.token_product, interpret=True)
    monkeypatch.setattr(triton_gpu, "token_product", run)
    (x, kernels, scale, _), _ = arrays(SMALL["gated"])

    def of(call: Any) -> Any:
        total = lambda x, scale: jnp.sum(call(x, kernels, scale)[0].astype(jnp.float32))  # noqa: E731
        return jax.grad(total, (0, 1))(x, scale)

    ours = of(lambda *given: api._triton(*given, None, None, gated=True, epsilon=1e-6, dtype=None))
    for found, exact in zip(ours, of(partial(reference.token_product, gated=True)), strict=True):
        assert_close(found, np.asarray(exact, np.float32), n=1024, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gated": True}, "two kernels of one shape"),
        ({"added": jnp.zeros((1, 3))}, "has its result's shape"),
        ({"scale": jnp.zeros(3)}, "scale must have x's width"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_product(jnp.zeros((1, 4)), [jnp.zeros((4, 2))], **options)
