"""A decoded token of a block: norms, products, gates and sums in few launches, and the slots that a block leaves."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt import layers
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, Stack, StackConfig, blt, init_stack_state, stack
from jaxblt.patching import PatcherConfig
from tests.tolerances import assert_close

CONFIG = StackConfig(
    dim=32,
    num_layers=3,
    pattern=("window", "hyena", "other"),
    mixers={"other": AttentionConfig(32, num_heads=4, num_kv_heads=2, out_bias=True)},
    scan=False,
)
SEGMENTS = jnp.array([[1] * 6, [1] * 3 + [0] * 3, [1, 1, -1, 1, 2, 2]])


def decoded(model: Stack, params: Any, x: Any) -> Any:
    """Return what each token gives, and the state behind them."""
    step = jax.jit(lambda x, ids, state: model.apply(params, x, segment_ids=ids, state=state))
    state, found = init_stack_state(CONFIG, len(x), capacity=8), []
    for t in range(x.shape[1]):
        y, state = step(x[:, t : t + 1], SEGMENTS[:, t : t + 1], state)
        found.append(y)
    return jnp.concatenate(found, 1), state


def test_blocks_with_joined_products_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(CONFIG), jax.random.normal(jax.random.key(0), (3, 6, 32))
    params = nn.meta.unbox(model.init(jax.random.key(1), x))
    apart, launches, product = decoded(model, params, x), [], layers.token_product

    def count(*given: Any, **options: Any) -> Any:
        launches.append(options)
        return product(*given, **options)

    monkeypatch.setattr(stack, "is_few_tokens", lambda x: x.shape[1] == 1)
    monkeypatch.setattr(layers, "token_product", count)
    joined = decoded(model, params, x)
    # Two for each MLP, and two for each mixer but the one with a bias
    assert len(launches) == 3 * 2 + 2 * 2
    assert sum("scale" in options for options in launches) == 5
    for found, known in zip(jax.tree.leaves(joined), jax.tree.leaves(apart), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)


def test_unused_slots_are_skipped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small = StackConfig(dim=128, num_layers=2, pattern=("hyena", "attention"), mlp_dim=8)
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16, capacity=12)
    model = BLTConfig(small, small, small, hash=None, bridge_heads=2).build(patcher=patcher)
    ids = jax.random.randint(jax.random.key(0), (2, 18), 4, 260)
    params = nn.meta.unbox(model.init(jax.random.key(1), ids[:, :16]))
    rows = jnp.array([[1, 1], [1, 0]])

    def after(size: int) -> Any:
        monkeypatch.setattr(blt, "HOLES", size)
        step = jax.jit(partial(model.apply, params, method="step"))
        state, logits = model.init_state(2, num_bytes=32), None
        for t in range(18):
            logits, _, state = step(ids[:, t], state, segment_ids=rows[:, int(t >= 8)])
        return logits, state

    for found, known in zip(jax.tree.leaves(after(3)), jax.tree.leaves(after(64)), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)
