"""Entropies of a trained byte model: none where text repeats, all of it where bytes are random."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.data.vocab import OFFSET
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.patching import byte_entropies

LENGTH, ROWS, PERIOD = 48, 8, 6


def drawn_rows(key: Any) -> Any:
    """Rows of one text of period 6 from any place in it, then as many rows of random bytes."""
    place, noise = jax.random.split(key)
    start = jax.random.randint(place, (ROWS, 1), 0, PERIOD)
    text = 97 + (start + jnp.arange(LENGTH)[None]) % PERIOD
    return OFFSET + jnp.concatenate([text, jax.random.randint(noise, (ROWS, LENGTH), 0, 256)])


@pytest.mark.slow(days=28, group="long")
def test_entropy_goes_to_zero_on_periodic_text_and_to_log_v_on_random_bytes() -> None:
    stack = StackConfig(dim=32, num_layers=1, pattern=("recurrence",), mlp_dim=64)
    module, optimizer = ByteLMConfig(stack=stack).build(), optax.adam(5e-3)

    def loss(params: Any, ids: Any) -> Any:
        logits, _ = module.apply({"params": params}, ids[:, :-1])  # pyright: ignore[reportGeneralTypeIssues]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    def step(carried: Any, key: Any) -> Any:
        params, state = carried
        value, gradient = jax.value_and_grad(loss)(params, drawn_rows(key))
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def trained(key: Any) -> Any:
        params = nn.meta.unbox(module.init(key, drawn_rows(key)))["params"]
        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, 600))
        apply = lambda params, ids, **options: module.apply({"params": params}, ids, **options)  # noqa: E731
        return byte_entropies(apply, params, drawn_rows(jax.random.key(9)))

    with jax.numpy_dtype_promotion("standard"):  # optax multiplies counts by floats
        entropies = np.asarray(trained(jax.random.key(0)))
    settled = entropies[:, LENGTH // 2 :]
    assert settled[:ROWS].max() < 0.05, settled[:ROWS].max()
    assert abs(settled[ROWS:].mean() - math.log(256)) < 0.02 * math.log(256), settled[ROWS:].mean()
