"""Gradients written by hand: what forward mode says, and derivatives of derivatives in loops."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.runtime import OwnGradient
from tests.tolerances import assert_close

ROW, STEPS = np.arange(1.0, 5.0, dtype=np.float32), np.float32([0.3, 0.7])
FACTOR = float(np.sin(2.0))
FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda f: jax.jvp(f, (STEPS,), (STEPS,)),
    "compiled": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(STEPS),
    "linearize": lambda f: jax.linearize(f, STEPS)[1](STEPS),
    "jacfwd": lambda f: jax.jacfwd(f)(STEPS),
    "hessian": lambda f: jax.hessian(f)(STEPS),
    "twice": lambda f: jax.jit(jax.jacfwd(jax.jacfwd(f)))(STEPS),
    "of a gradient": lambda f: jax.jvp(jax.grad(f), (STEPS,), (STEPS,)),
}


@OwnGradient
def product(a: Any, b: Any) -> Any:
    """a b sin 2, of which the sine is a constant that a jitted call makes."""
    return a * b * jax.jit(jnp.sin)(jnp.full(4, 2.0))


product.defvjp(
    lambda a, b: (product(a, b), (a, b)), lambda kept, dy: (dy * kept[1] * FACTOR, dy * kept[0] * FACTOR)
)


def plain(a: Any, b: Any) -> Any:
    return a * b * FACTOR


def looped(op: Callable[..., Any], remat: bool = False) -> Callable[[Any], Any]:
    """A sum of what several steps of a scan make of `ROW`."""
    step = lambda h, w: op(jax.nn.sigmoid(h * w), jnp.tanh(h) * w)  # noqa: E731
    step = jax.checkpoint(step) if remat else step
    return lambda ws: jnp.sum(jnp.sin(jax.lax.scan(lambda h, w: (step(h, w), None), ROW, ws)[0]))


def twice(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(jnp.square(jax.grad(f)(x))))


@pytest.mark.parametrize("mode", FORWARD)
def test_forward_mode_says_what_to_do(mode: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"do not pass {__name__}, ")) as caught:
        FORWARD[mode](looped(product))
    assert "`with jaxblt.reference_ops():`" in str(caught.value)


@pytest.mark.slow(days=28, group="properties of kernels", every="True")
@pytest.mark.parametrize("remat", [False, True])
def test_reverse_mode_is_right_to_the_second_order_in_a_loop(remat: bool) -> None:
    ops = [looped(product, remat), looped(plain)]
    found, expected = jax.jit(lambda x: [(jax.grad(f)(x), twice(f)(x)) for f in ops])(STEPS)
    jax.tree.map(lambda a, b: assert_close(a, b, n=ROW.size * STEPS.size), found, expected)


def test_a_loop_keeps_arguments_once() -> None:
    """As many arrays as with `jax.custom_vjp`, none of which is a copy."""

    def kept(op: Any) -> list[tuple[int, ...]]:
        (scan, *_) = (
            e for e in jax.make_jaxpr(jax.grad(looped(op)))(STEPS).eqns if e.primitive.name == "scan"
        )
        assert "copy" not in str(scan.params["jaxpr"])
        return [v.aval.shape for v in scan.outvars]

    other = jax.custom_vjp(lambda a, b: plain(a, b))
    other.defvjp(
        lambda a, b: (plain(a, b), (a, b)),
        lambda kept, dy: (dy * kept[1] * FACTOR, dy * kept[0] * FACTOR),
    )
    assert kept(product) == kept(other)
