"""Arrays and states that do not fit a call of a byte-patched model: one row's would count for all of them."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, HashConfig, StackConfig, init_blt_state
from jaxblt.patching import PatcherConfig, from_closed

HEADS = {"A": AttentionConfig(dim=4, num_heads=1)}
STACK = StackConfig(dim=4, num_layers=1, pattern="A", mixers=HEADS, mlp_dim=0)
CONFIG = BLTConfig(encoder=STACK, latent=STACK, decoder=STACK, hash=None, bridge_heads=1)
PATCHER = PatcherConfig(mode="entropy", threshold=0.5, block_size=8)
IDS, ENTROPIES, CLOSED = (
    jax.device_put(np.full((3, 16), value, dtype))
    for value, dtype in ((70, np.int32), (1, np.float32), (1, bool))
)
SHAPE = r"must have the shape of ids, \(3, 16\), got \(1, 16\)"
OF_STEP = r"must have the shape of ids, \(3,\), got \(1,\)"
OF_OTHERS = (
    "the state is of blocks of 8 bytes in 5 patches, and the patcher's are of 8 in 8: make it by init_state"
)
ROWS = "ids have 3 rows and the state 2: make it by init_state of as many rows"
GRAMS = "the state is of an embedding with n-grams, and the config has one without"
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
    "a prompt's rows": ("prefill", {"entropies": ENTROPIES, "rows": 2}, ROWS),
    "a prompt's n-grams": ("prefill", {"entropies": ENTROPIES, "hash": HashConfig(table_size=9)}, GRAMS),
    "a byte's rows": ("step", {"entropies": ENTROPIES[:, 0], "rows": 2}, ROWS),
    "a byte's entropies": ("step", {"entropies": ENTROPIES[:1, 0]}, f"entropies {OF_STEP}"),
    "a byte's boundaries": ("step", {"closed": CLOSED[:1, 0]}, f"closed {OF_STEP}"),
    "a byte's state": ("step", {"entropies": ENTROPIES[:, 0], "slots": 5}, OF_OTHERS),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused(name: str) -> None:
    method, options, says = CASES[name]
    given = dict(options)
    slots, rows, grams = given.pop("slots", None), given.pop("rows", 3), given.pop("hash", None)
    args: tuple[Any, ...] = (IDS,)
    if method != "__call__":
        args = (IDS if method == "prefill" else IDS[:, 0],)
        config, patcher = (
            dataclasses.replace(CONFIG, hash=grams),
            dataclasses.replace(PATCHER, capacity=slots),
        )
        args += (init_blt_state(config, patcher, rows, num_bytes=16),)
    if method == "prefill":
        given["segment_ids"] = jnp.ones_like(IDS)
    module = CONFIG.build(patcher=PATCHER)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(
            lambda key: module.init_with_output(key, *args, **given, method=method), jax.random.key(0)
        )


PACKED = np.asarray([[1] * 8 + [2] * 5 + [0] * 3] * 3, np.int32)
TWO_LATER = PACKED.copy()
TWO_LATER[2, 13] = 2


@pytest.mark.parametrize(
    ("of", "given", "says"),
    [
        (PACKED, None, "byte 8 of row 0 in document 2, and segment_ids in 1 "),
        (None, PACKED, "byte 8 of row 0 in document 1, and segment_ids in 2 "),
        (PACKED, TWO_LATER, "byte 13 of row 2 in document 0, and segment_ids in 2 "),
        (PACKED[:2], PACKED, "patches of 2 rows of 16 bytes do not fit ids of 3 rows of 16"),
        (PACKED[:, :8], PACKED, "patches of 3 rows of 8 bytes do not fit ids of 3 rows of 16"),
    ],
)
def test_patches_of_other_bytes_are_refused(of: Any, given: Any, says: str) -> None:
    documents, given = (None if x is None else jax.device_put(x) for x in (of, given))
    documents = jnp.ones_like(IDS) if documents is None else documents
    patches = jax.jit(partial(from_closed, block_size=8, capacity=8))(documents > 0, documents)
    module = CONFIG.build()
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(
            lambda key: module.init(key, IDS, segment_ids=given, patches=patches), jax.random.key(0)
        )
