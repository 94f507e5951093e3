"""Decoding with layers one by one and weights in its dtype: the bytes of the scanned stack in fp32."""

import dataclasses
import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.inference import Decoder, decode_step, init_decoder
from jaxblt.inference.narrow import narrow_params
from jaxblt.inference.unroll import unroll_params, unroll_state, unrolled
from jaxblt.mixers import StateEngineConfig
from jaxblt.models import BLTConfig, ByteLMConfig, LevelConfig, StackConfig
from jaxblt.models.experimental.coded_turns import CodedTurnsConfig
from jaxblt.patching import PatcherConfig
from jaxblt.patching.learned import BoundaryConfig
from tests.pallas_kernels.linear_state import equations
from tests.parameters import drawn

CONFIG = ByteLMConfig(stack=StackConfig(dim=16, num_layers=5, pattern="AH", mlp_dim=24))


@pytest.mark.slow(days=28, group="costly", turn="inference/test_unroll")
def test_layers_apart_and_narrow_weights_change_no_logit() -> None:
    decoder = Decoder(CONFIG, dtype=jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (3, 6)), jnp.int32)
    params = {"model": drawn(CONFIG.build(), ids)["params"]}
    state, other = (init_decoder(d, 3, num_bytes=8) for d in (decoder, unrolled(decoder)))
    assert jax.tree.structure(unroll_state(state)) == jax.tree.structure(other)
    apart = narrow_params(unrolled(decoder), 3, unroll_params(params), other)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(apart)}
    assert kinds == {"bfloat16", "float32"}
    steps = [jax.jit(partial(decode_step, d)) for d in (decoder, unrolled(decoder))]
    for column in ids.T:
        wanted, _, state = steps[0](params, column, state, jnp.ones_like(column))
        found, _, other = steps[1](apart, column, other, jnp.ones_like(column))
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_unroll")
def test_kernels_and_tables_of_bytes_become_narrow() -> None:
    decoder = unrolled(Decoder(CONFIG, dtype=jnp.bfloat16))
    params = nn.meta.unbox(
        jax.eval_shape(decoder.build().init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    )
    state = jax.eval_shape(partial(init_decoder, decoder, 1, num_bytes=8))
    narrow = jax.eval_shape(partial(narrow_params, decoder, 1), {"model": params["params"]}, state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(narrow):
        is_read_narrow = path[-1].key in ("kernel", "bytes")
        assert (leaf.dtype == jnp.bfloat16) == is_read_narrow, jax.tree_util.keystr(path)


def test_the_state_of_a_scanned_stack_is_refused_by_an_unrolled_one() -> None:
    decoder = unrolled(Decoder(CONFIG))
    state = init_decoder(Decoder(CONFIG), 1, num_bytes=8)
    ids = jnp.zeros((1,), jnp.int32)
    params = drawn(decoder.model.build(), jnp.zeros((1, 8), jnp.int32))["params"]
    with pytest.raises(ValueError, match="scan=True, and this one has scan=False"):
        decode_step(decoder, {"model": params}, ids, state, ids + 1)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_unroll")
def test_steps_copy_no_cache() -> None:
    """A loop over layers needs as much again as all caches; one after another, layers need less than half of it."""
    config = dataclasses.replace(CONFIG, stack=dataclasses.replace(CONFIG.stack, pattern="A", num_layers=4))
    sizes = []
    for decoder in (Decoder(config), unrolled(Decoder(config))):
        ids = jnp.zeros((1, 8), jnp.int32)
        params = nn.meta.unbox(jax.eval_shape(decoder.build().init, jax.random.key(0), ids))["params"]
        state = jax.eval_shape(partial(init_decoder, decoder, 1, num_bytes=8192))

        def steps(params: Any, ids: Any, state: Any, decoder: Decoder = decoder) -> Any:
            def body(state: Any, column: Any) -> Any:
                logits, _, state = decode_step(decoder, params, column, state, jnp.ones_like(column))
                return state, logits

            return jax.lax.scan(body, state, ids.T)

        compiled = jax.jit(steps, donate_argnums=2).lower({"model": params}, ids, state).compile()
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes / held)
    assert sizes[1] < 0.5 < 1 < sizes[0], sizes


def test_stacks_of_parts_are_taken_apart_too() -> None:
    """Their states are: a step refused them while a model's own stacks alone were unrolled."""
    small = CONFIG.stack
    level = LevelConfig(encoder=small, decoder=small)
    options = {"features_enter": "output", "router": BoundaryConfig(), "level": level}
    patched = BLTConfig(small, small, small, **options)
    apart: Any = unrolled(Decoder(patched, PatcherConfig(mode="learned", target=3.0))).model
    engine = dataclasses.replace(small, pattern=("E",), mixers={"E": StateEngineConfig(dim=16)})
    turns: Any = unrolled(Decoder(CodedTurnsConfig(ByteLMConfig(engine)))).model
    stacks = (apart.encoder, apart.latent, apart.decoder, apart.level.encoder, apart.level.decoder)
    assert not any(stack.scan for stack in (*stacks, turns.base.stack))


@pytest.mark.slow(days=28, group="costly", turn="inference/test_unroll")
def test_a_step_puts_no_cache_under_a_condition() -> None:
    """XLA copies what a condition leaves as it is; here the latent stack's caches, at each byte of all rows."""
    small = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=16)
    config = BLTConfig(small, dataclasses.replace(small, pattern="A"), small, hash=None)
    decoder = unrolled(Decoder(config, PatcherConfig(mode="static", block_size=64)))
    ids = jnp.zeros((2, 64), jnp.int32)
    params = nn.meta.unbox(jax.eval_shape(decoder.build().init, jax.random.key(0), ids))["params"]
    state = jax.eval_shape(partial(init_decoder, decoder, 2, num_bytes=1024))
    step = jax.make_jaxpr(partial(decode_step, decoder))
    found = list(equations(step({"model": params}, ids[:, 0], state, ids[:, 0]).jaxpr))
    cache = max((leaf.shape for leaf in jax.tree.leaves(state.model.latent)), key=math.prod)
    carried = {e.primitive.name for e in found if cache in [x.aval.shape for x in e.outvars]}
    assert "while" in carried
    assert "cond" not in carried
