"""Under jax_enable_x64 programs hold the same dtypes as without, and draw the same bytes."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.inference import Decoder, SamplingConfig, generate, init_decoder
from jaxblt.inference.generate import _advance, _begin
from jaxblt.inference.requests import lay_out
from jaxblt.inference.unroll import unroll_params, unrolled
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.training.evaluate import make_eval_step
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer, make_schedule
from jaxblt.training.start.setup import init_params
from jaxblt.training.state import ENTROPY, Frozen, start
from jaxblt.training.step import Task, make_train_step
from tests.mixer_table import table
from tests.training.tiny import random_batch, tiny_recipe

HEADS = AttentionConfig(dim=8, num_heads=2)
LOCAL = StackConfig(dim=8, num_layers=1, pattern="W", mlp_dim=12, mixers=table(attention=HEADS, window=8))
GRAMS = HashConfig(sizes=(3,), table_size=64)
BYTES = ByteLMConfig(stack=LOCAL, hash=GRAMS)
FILTERS = {
    "modal": ModalFilter(modes=4, max_timescale=64.0),
    "explicit": ExplicitFilter(taps=8),
    "implicit": ImplicitFilter(filter_len=128, width=4),
}
PATCHER = PatcherConfig(mode="entropy", threshold=5.0, block_size=16, capacity=8)


def blt(long_filter):
    hyena = HyenaConfig(dim=8, filter=long_filter)
    latent = dataclasses.replace(
        LOCAL, pattern=("H", "recurrence", "A"), num_layers=3, mixers={"H": hyena, "A": HEADS}
    )
    return BLTConfig(LOCAL, latent, LOCAL, hash=GRAMS, bridge_heads=2)


def wide(tree):
    """Leaves of more than 32 bits."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.dtype for path, leaf in leaves if leaf.dtype.itemsize > 4}


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize("name", ["modal", "explicit", "implicit", "bytes"])
def test_nothing_becomes_wider_than_32_bits(name):
    """Traced only: params, a train step, an evaluation step, and a prompt with the bytes drawn behind it."""
    model = BYTES if name == "bytes" else blt(FILTERS[name])
    patcher = None if name == "bytes" else PATCHER
    task = Task(model.build(patcher=patcher), entropy_model=BYTES.build())
    batch = jax.tree.map(np.asarray, random_batch(0, rows=2))
    index, adamw = np.int32(0), AdamWConfig(warmup_steps=4)
    sampling = SamplingConfig(top_k=5, top_p=0.9)
    decoder = Decoder(model, patcher, BYTES)
    with jax.enable_x64(True):
        boxed = jax.eval_shape(lambda: init_params(task, tiny_recipe().data, 0))
        entropy = nn.meta.unbox(jax.eval_shape(BYTES.build().init, jax.random.key(0), batch.inputs)["params"])
        params, optimizer = nn.meta.unbox(boxed), make_optimizer(adamw, 10, boxed)
        frozen = None if patcher is None else {ENTROPY: Frozen(entropy, "")}
        state = jax.eval_shape(partial(start, optimizer=optimizer, frozen=frozen), params)
        step = make_train_step(task, optimizer, schedule=make_schedule(adamw, 10))
        table, asked = lay_out([b"abcd", b"a longer one"], 3, sampling, 0)
        weights = {"model": params, "entropy": entropy}
        place = jax.eval_shape(partial(_begin, decoder, 128), weights, table, asked.lengths)
        found = {
            "asked": (table, asked),
            "state": state,
            "step": jax.eval_shape(step, state, batch),
            "sums": jax.eval_shape(make_eval_step(task), state, batch, index),
            "caches": jax.eval_shape(partial(init_decoder, decoder, 2, num_bytes=40)),
            "place": place,
            "drawn": jax.eval_shape(
                partial(_advance, unrolled(decoder), 2),
                jax.eval_shape(unroll_params, weights),
                asked,
                place,
                np.int32(0),
            ),
        }
    assert not wide(found)


@pytest.mark.slow(days=28, group="decoding")
def test_the_same_bytes_are_drawn():
    params = nn.meta.unbox(BYTES.build().init(jax.random.key(0), jnp.ones((1, 8), jnp.int32)))["params"]
    write = partial(generate, Decoder(BYTES), {"model": params}, [b"abc", b"a longer one"], max_new_bytes=8)
    expected = write(seed=2**32 - 1)
    with jax.enable_x64(True):
        assert write(seed=2**32 - 1) == expected
