"""The slots that a block of patches leaves unused, which the latent stack skips while it decodes."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.models import BLTConfig, StackConfig, blt
from jaxblt.patching import PatcherConfig
from tests.tolerances import assert_close


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
