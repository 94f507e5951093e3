"""The slots that a block of patches leaves unused, which the latent stack skips while it decodes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, StackConfig, blt
from jaxblt.patching import PatcherConfig
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import assert_close

LOCAL = StackConfig(dim=16, num_layers=1, pattern=("recurrence",), mlp_dim=0)
MIXERS = table(
    hyena=HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=64.0)),
    attention=AttentionConfig(dim=16, num_heads=2),
)
LATENT = StackConfig(dim=16, num_layers=2, pattern="HA", mlp_dim=0, mixers=MIXERS)


@pytest.mark.slow(days=28, group="costly")
def test_unused_slots_are_skipped_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of four patches leaves 8 of its 12 slots unused: three pieces of 3, or one."""
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16, capacity=12)
    model = BLTConfig(LOCAL, LATENT, LOCAL, hash=None, bridge_heads=2).build(patcher=patcher)
    ids = np.random.default_rng(0).integers(4, 260, (2, 18)).astype(np.int32)
    params = drawn(model, ids[:, :16])
    rows = np.array([[1, 1], [1, 0]], np.int32)

    def after(size: int) -> Any:
        monkeypatch.setattr(blt, "HOLES", size)
        step = jax.jit(partial(model.apply, params, method="step"))
        state, logits = model.init_state(2, num_bytes=32), None
        for t in range(18):
            column, given = (jnp.asarray(x) for x in (ids[:, t], rows[:, int(t >= 8)]))
            logits, _, state = step(column, state, segment_ids=given)
        return logits, state

    for found, known in zip(jax.tree.leaves(after(3)), jax.tree.leaves(after(64)), strict=True):
        assert_close(np.asarray(found, np.float32), np.asarray(known, np.float32), n=256)
