"""A confidence that is trained to say how often a code is right says so."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxblt.adapters import Confidence

WIDTH, ROWS, TOKENS = 8, 64, 64


class Sure(nn.Module):
    """What `Confidence` leaves of a code of 1 whose fallback is 0: u itself."""

    @nn.compact
    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        moment = SimpleNamespace(hidden=hidden, fallback=0.0)
        code, _ = Confidence(start=0.9).apply(
            self, "sure", jnp.ones((*hidden.shape[:2], 1)), moment, None, ()
        )
        return code[..., 0]


def test_it_is_calibrated_when_it_is_trained_to_a_target() -> None:
    """Expected calibration error over ten equal shares of the tokens (Guo et al. 2017, arXiv:1706.04599, sec. 2)."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=WIDTH).astype(np.float32)

    def draw() -> tuple[Array, np.ndarray, Array]:
        hidden = rng.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32)
        truth = 1 / (1 + np.exp(-hidden @ weights))
        return jnp.asarray(hidden), truth, jnp.asarray(rng.random(truth.shape) < truth, jnp.float32)

    def error(sure: np.ndarray, right: Array) -> float:
        right = np.asarray(right)
        shares = np.array_split(np.argsort(sure.ravel()), 10)
        return float(np.mean([abs(sure.ravel()[i].mean() - right.ravel()[i].mean()) for i in shares]))

    hidden, _, right = draw()
    params, descent = Sure().init(jax.random.key(0), hidden), optax.sgd(2.0)

    @jax.jit
    def train(params: dict, hidden: Float[Array, "B T D"], right: Float[Array, "B T"]) -> dict:
        def loss(params: dict) -> Float[Array, ""]:
            sure = Sure().apply(params, hidden)
            return -jnp.mean(right * jnp.log(sure) + (1 - right) * jnp.log1p(-sure))

        def step(carry: tuple, _: None) -> tuple:
            params, slots = carry
            updates, slots = descent.update(jax.grad(loss)(params), slots)
            return (optax.apply_updates(params, updates), slots), None

        return jax.lax.scan(step, (params, descent.init(params)), length=500)[0][0]

    trained = train(params, hidden, right)
    hidden, truth, right = draw()
    before, after = (np.asarray(Sure().apply(p, hidden)) for p in (params, trained))
    assert error(before, right) > 0.2
    assert error(after, right) < 0.04
    assert np.corrcoef(after.ravel(), truth.ravel())[0, 1] > 0.99
    assert after.min() < 0.05
    assert after.max() > 0.95
