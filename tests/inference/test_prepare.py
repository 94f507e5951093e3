"""Decoding with what is made of parameters once: the same logits, and no network of taps in a step."""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.inference import (
    Decoder,
    decode_step,
    generate,
    init_decoder,
    prefill,
    prepare_decoding,
)
from jaxblt.mixers import AttentionConfig, HyenaConfig, ImplicitFilter
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, make_patches
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import assert_close

LONG = HyenaConfig(dim=8, filter=ImplicitFilter(600, width=5))
SHORT = HyenaConfig(dim=8, filter=ImplicitFilter(30, width=5))
KEY = jax.random.key(0)
LAYERS, ROWS, NUM_BYTES = 2, 2, 80


def stack(pattern: str, hyena: HyenaConfig) -> StackConfig:
    heads = AttentionConfig(dim=8, num_heads=2)
    mixers = table(hyena=hyena, attention=heads, window=8)
    return StackConfig(dim=8, num_layers=LAYERS, pattern=pattern, mlp_dim=8, mixers=mixers)


BYTES = ByteLMConfig(stack=stack("H", LONG))


def prepared(decoder: Decoder, params: Any) -> dict[str, Any]:
    """What is added, as shapes."""
    made = jax.eval_shape(partial(prepare_decoding, decoder, rows=ROWS, num_bytes=NUM_BYTES), params)
    return jax.tree.map(lambda leaf: leaf.shape, made["prepared"])


@pytest.mark.slow(days=28, group="costly", turn="inference/test_prepare")
def test_a_scanned_stack_decodes_from_the_taps_of_all_layers() -> None:
    """A prompt, and bytes one by one: the logits of the parallel pass."""
    decoder = Decoder(BYTES)
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (ROWS, 20)), jnp.int32)
    params = {"model": drawn(BYTES.build(), ids)["params"]}
    given = prepare_decoding(decoder, params, rows=ROWS, num_bytes=NUM_BYTES)
    (taps,) = jax.tree.leaves(given["prepared"])
    assert taps.shape[:2] == (LAYERS, 8)
    cut = 12
    logits, state = jax.jit(partial(prefill, decoder, num_bytes=NUM_BYTES))(
        given, ids[:, :cut], jnp.ones((ROWS, cut), jnp.int32)
    )
    ones, found = jnp.ones(ROWS, jnp.int32), [logits]
    lowered = jax.jit(partial(decode_step, decoder)).lower(given, ids[:, 0], state, ones)
    step = lowered.compile()
    for t in range(cut, ids.shape[1]):
        logits, _, state = step(given, ids[:, t], state, ones)
        found.append(logits)
    whole = jax.jit(BYTES.build().apply)({"params": params["model"]}, ids)[0]
    assert_close(jnp.stack(found, 1), whole[:, cut - 1 :], n=20 * 8)
    made = jax.jit(partial(decode_step, decoder)).lower(params, ids[:, 0], state, ones)
    assert ["sine" in program.as_text() for program in (made, lowered)] == [True, False]


@pytest.mark.slow(days=28, group="costly", turn="inference/test_prepare")
def test_every_stack_and_the_entropy_model_are_prepared() -> None:
    local, latent = stack("W", LONG), stack("HA", LONG)
    model = BLTConfig(stack("H", SHORT), latent, local, bridge_heads=2, hash=None)
    patcher = PatcherConfig(mode="entropy", threshold=5.2, block_size=16, capacity=12, entropy_context=24)
    decoder, ids = Decoder(model, patcher, BYTES), jnp.ones((1, 16), jnp.int32)
    patches = jax.eval_shape(partial(make_patches, patcher), ids, entropies=jnp.zeros(ids.shape))

    def init(config: Any, **given: Any) -> Any:
        return jax.eval_shape(config.build().init, KEY, ids, **given)

    params = {"model": init(model, patches=patches)["params"], "entropy": init(BYTES)["params"]}
    found = prepared(decoder, params)
    sizes = {
        name: [shape[:-1] for shape in jax.tree.leaves(found[name], is_leaf=lambda x: isinstance(x, tuple))]
        for name in found
    }
    assert sizes == {"model": [(LAYERS, 8), (1, 8)], "entropy": [(LAYERS, 8)]}


def test_models_without_such_arrays_keep_their_parameters() -> None:
    attention, params = ByteLMConfig(stack=stack("A", HyenaConfig(dim=8))), {"model": {"any": 1}}
    assert prepare_decoding(Decoder(attention), params, rows=1, num_bytes=9) is params


@pytest.mark.slow(days=28, group="costly")
def test_generation_prepares(monkeypatch: Any) -> None:
    """Once for all of its programs, for the documents that their state holds."""

    class Began(Exception):
        pass

    def begin(decoder: Decoder, num_bytes: int, params: Any, *rest: Any) -> None:
        prefilled = jax.eval_shape(partial(init_decoder, decoder, ROWS, num_bytes=num_bytes))
        (taps,) = jax.tree.leaves(params["prepared"])
        assert taps.shape[2] == prefilled.model.stack.periods[0].filters[0].past.shape[-1] + 1
        raise Began

    monkeypatch.setattr(sys.modules["jaxblt.inference.generate"], "_begin", begin)
    params = {"model": drawn(BYTES.build(), jnp.ones((1, 4), jnp.int32))["params"]}
    with pytest.raises(Began):
        generate(Decoder(BYTES), params, [b"01234"], max_new_bytes=3)
