"""A block that decodes one token: norms, products, gates and sums in few launches."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt import layers
from jaxblt.mixers import AttentionConfig
from jaxblt.models import Stack, StackConfig, init_stack_state, stack
from pallas_kernels.token_product import token_product
from tests.tolerances import assert_close

CONFIG = StackConfig(
    dim=32,
    num_layers=3,
    pattern=("window", "hyena", "other"),
    mixers={"other": AttentionConfig(32, num_heads=4, num_kv_heads=2, out_bias=True)},
    scan=False,
)
SEGMENTS = {"content": [1] * 6, "padding": [1] * 3 + [0] * 3, "holes and documents": [1, 1, -1, 1, 2, 2]}


def decoded(params: Any, x: Any, segments: Any) -> Any:
    """Return what each token gives, and the state behind them."""
    step = jax.jit(lambda x, ids, state: Stack(CONFIG).apply(params, x, segment_ids=ids, state=state))
    state, found = init_stack_state(CONFIG, 1, capacity=8), []
    for t in range(x.shape[1]):
        y, state = step(x[:, t : t + 1], segments[:, t : t + 1], state)
        found.append(y)
    return jnp.concatenate(found, 1), state


def test_blocks_with_joined_products_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jax.random.normal(jax.random.key(0), (1, 6, 32))
    params = nn.meta.unbox(Stack(CONFIG).init(jax.random.key(1), x))
    rows = {name: jnp.array([ids]) for name, ids in SEGMENTS.items()}
    apart, launches = {name: decoded(params, x, ids) for name, ids in rows.items()}, []

    def count(*given: Any, **options: Any) -> Any:
        launches.append(options)
        return token_product(*given, **options)

    monkeypatch.setattr(stack, "is_lone_token", lambda x: x.shape[:2] == (1, 1))
    monkeypatch.setattr(layers, "token_product", count)
    for name, ids in rows.items():
        launches.clear()
        joined = decoded(params, x, ids)
        # Two for each MLP, and two for each mixer but the one with a bias
        assert len(launches) == 3 * 2 + 2 * 2
        assert sum("scale" in options for options in launches) == 5
        for found, known in zip(jax.tree.leaves(joined), jax.tree.leaves(apart[name]), strict=True):
            assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)
