"""Arrays and states that do not fit a call of a byte-patched model: one row's would count for all of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, StackConfig, init_blt_state
from jaxblt.patching import PatcherConfig

HEADS = {"A": AttentionConfig(dim=4, num_heads=1)}
STACK = StackConfig(dim=4, num_layers=1, pattern="A", mixers=HEADS, mlp_dim=0)
CONFIG = BLTConfig(encoder=STACK, latent=STACK, decoder=STACK, hash=None, bridge_heads=1)
PATCHER = PatcherConfig(mode="entropy", threshold=0.5, block_size=8)
IDS, ENTROPIES, CLOSED = jnp.full((3, 16), 70, jnp.int32), jnp.ones((3, 16)), jnp.ones((3, 16), bool)
SHAPE = r"must have the shape of ids, \(3, 16\), got \(1, 16\)"
OF_STEP = r"must have the shape of ids, \(3,\), got \(1,\)"
OF_OTHERS = (
    "the state is of blocks of 8 bytes in 5 patches, and the patcher's are of 8 in 8: make it by init_state"
)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "positions of one row": (
        "__call__",
        {"positions": IDS[:1], "entropies": ENTROPIES},
        f"positions {SHAPE}",
    ),
    "positions of floats": (
        "__call__",
        {"positions": ENTROPIES, "entropies": ENTROPIES},
        "positions must be an integer array, got float32",
    ),
    "a prompt's entropies": ("prefill", {"entropies": ENTROPIES[:1]}, f"entropies {SHAPE}"),
    "a prompt's boundaries": ("prefill", {"closed": CLOSED[:1]}, f"closed {SHAPE}"),
    "a prompt's state": ("prefill", {"entropies": ENTROPIES, "slots": 5}, OF_OTHERS),
    "a byte's entropies": ("step", {"entropies": ENTROPIES[:1, 0]}, f"entropies {OF_STEP}"),
    "a byte's boundaries": ("step", {"closed": CLOSED[:1, 0]}, f"closed {OF_STEP}"),
    "a byte's state": ("step", {"entropies": ENTROPIES[:, 0], "slots": 5}, OF_OTHERS),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused(name: str) -> None:
    method, options, says = CASES[name]
    slots, given = options.get("slots"), {key: x for key, x in options.items() if key != "slots"}
    args: tuple[Any, ...] = (IDS,)
    if method != "__call__":
        args = (IDS if method == "prefill" else IDS[:, 0],)
        args += (init_blt_state(CONFIG, dataclasses.replace(PATCHER, capacity=slots), 3, num_bytes=16),)
    if method == "prefill":
        given["segment_ids"] = jnp.ones_like(IDS)
    module = CONFIG.build(patcher=PATCHER)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(
            lambda key: module.init_with_output(key, *args, **given, method=method), jax.random.key(0)
        )
