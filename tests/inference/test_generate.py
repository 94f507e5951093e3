"""Decoding from caches equals the parallel pass; sampling; independent rows."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import EOS
from jaxblt.inference import (
    Decoder,
    SamplingConfig,
    decode_step,
    generate,
    init_decoder,
    sample,
    teacher_force,
)
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.sequence import splits_call
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig, init_byte_lm_state
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig, byte_entropies, decided, make_patches
from jaxblt.testing.collectives import collectives
from tests.tolerances import tol

HEADS = AttentionConfig(dim=16, num_heads=2)
LOCAL = StackConfig(dim=16, num_layers=1, pattern="W", window=8, mlp_dim=24, attention=HEADS)
ENTROPY = ByteLMConfig(stack=LOCAL)
MODEL = BLTConfig(
    encoder=LOCAL,
    latent=StackConfig(dim=16, num_layers=2, pattern="HA", mlp_dim=24, attention=HEADS),
    decoder=LOCAL,
    hash=HashConfig(sizes=(3,), table_size=64),
    bridge_heads=2,
)
PATCHER = PatcherConfig(mode="entropy", threshold=5.2, block_size=32, capacity=24)


def unboxed(config, *inputs):
    return nn.meta.unbox(jax.jit(config.build().init)(jax.random.key(0), *inputs))["params"]


@pytest.fixture(scope="module")
def trained():
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 80)), jnp.int32)
    entropy = jax.tree.map(lambda p: 2.0 * p if p.ndim > 1 else p, unboxed(ENTROPY, ids))
    patches = make_patches(PATCHER, ids, entropies=jnp.zeros(ids.shape))
    return {"model": unboxed(MODEL, ids, patches), "entropy": entropy}, ids


def test_bytes_one_by_one_equal_the_parallel_pass(trained):
    params, ids = trained
    segments = jnp.ones_like(ids)
    decoder = Decoder(MODEL, PATCHER, ENTROPY)
    logits, closed = jax.jit(lambda p, i, s: teacher_force(decoder, p, i, s))(params, ids, segments)
    build = ENTROPY.build()
    entropies = byte_entropies(lambda p, i, **o: build.apply({"params": p}, i, **o), params["entropy"], ids)
    patches = make_patches(PATCHER, ids, entropies=entropies)
    sure = np.asarray(decided(PATCHER, entropies, segments, error=1e-4))
    assert sure.all()
    np.testing.assert_array_equal(np.asarray(closed), np.asarray(patches.closed).reshape(2, -1)[:, :80])
    assert 5 < int(jnp.sum(closed)) < 155
    whole = MODEL.build().apply({"params": params["model"]}, ids, patches)
    np.testing.assert_allclose(np.asarray(logits), np.asarray(whole), **tol(jnp.float32, 1024))


def test_a_row_does_not_depend_on_its_neighbours(trained):
    params, _ = trained
    decoder = Decoder(MODEL, PATCHER, ENTROPY)
    greedy = SamplingConfig(temperature=0)
    together = generate(decoder, params, [b"abc", b"a longer prompt"], max_new_bytes=12, sampling=greedy)
    alone = generate(decoder, params, [b"a longer prompt"], max_new_bytes=12, sampling=greedy)
    assert together[1] == alone[0]
    assert len(together[0]) == 12


def test_a_byte_model_generates_the_argmax_of_its_parallel_pass():
    prompt = b"0123"
    ids = jnp.asarray([[1, *(b + 4 for b in prompt)]], jnp.int32)
    params = unboxed(ENTROPY, ids)
    [text] = generate(
        Decoder(ENTROPY), {"model": params}, [prompt], max_new_bytes=6, sampling=SamplingConfig(temperature=0)
    )
    for _ in range(len(text)):
        logits = ENTROPY.build().apply({"params": params}, ids)[0, -1]
        best = int(jnp.argmax(jnp.where(jnp.isin(jnp.arange(260), jnp.array([0, 1, 3])), -jnp.inf, logits)))
        ids = jnp.concatenate([ids, jnp.asarray([[best]], jnp.int32)], 1)
    assert text == bytes(int(i) - 4 for i in ids[0, 5:])
    assert EOS not in np.asarray(ids)


def expect_the_bytes_of_one_device(decoder, params, prompts):
    """Greedy bytes on a mesh that splits the sequence; a step exchanges partial results alone, and keeps its parts."""
    greedy = partial(generate, decoder, params, max_new_bytes=30, sampling=SamplingConfig(temperature=0))
    expected, ids = greedy(prompts), jnp.ones(len(prompts), jnp.int32)
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        assert greedy(prompts) == expected
        state = init_decoder(decoder, len(prompts), num_bytes=90)
        step = jax.jit(partial(decode_step, decoder)).lower(params, ids, state, ids).compile()
        after = step(params, ids, state, ids)[2]
    assert {c.kind for c in collectives(step)} == {"all-reduce"}
    caches = [leaf for leaf in jax.tree.leaves(after) if leaf.ndim == 5 and leaf.shape[2] > LOCAL.window]
    assert len(caches) == 2
    for cache in caches:
        assert {shard.data.shape[2] for shard in cache.addressable_shards} == {cache.shape[2] // 4}


def test_a_byte_model_s_caches_split_over_the_sequence():
    config = ByteLMConfig(stack=dataclasses.replace(LOCAL, num_layers=2, pattern="HA"))
    params = {"model": unboxed(config, jnp.ones((1, 8), jnp.int32))}
    expect_the_bytes_of_one_device(Decoder(config), params, [b"abc", b"a longer prompt"])


def test_a_byte_patched_model_s_caches_split_over_the_sequence(trained):
    """Its prompts close blocks, whose unused slots the latent stack passes over."""
    prompts = [b"abc", b"a longer prompt, of more than a block of bytes"]
    expect_the_bytes_of_one_device(Decoder(MODEL, PATCHER, ENTROPY), trained[0], prompts)


def test_a_byte_model_takes_a_prompt_split_over_the_sequence():
    stack = dataclasses.replace(LOCAL, num_layers=3, pattern="HAW")
    config, prompt = ByteLMConfig(stack=stack, hash=HashConfig(sizes=(3,), table_size=64)), 256
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, prompt + 2)), jnp.int32)
    model, params = config.build(), {"params": unboxed(config, ids)}
    stream, logits = jax.jit(partial(model.apply, method="stream")), []
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        assert splits_call(prompt)
        state = init_byte_lm_state(config, 2, capacity=prompt + 2)
        for part in (ids[:, :prompt], ids[:, prompt:-1], ids[:, -1:]):
            y, state = stream(params, part, state)
            logits.append(np.asarray(y))
    expected = jax.jit(model.apply)(params, ids)
    np.testing.assert_allclose(np.concatenate(logits, 1), np.asarray(expected), **tol(jnp.float32, 1024))


def test_sampling_keeps_to_top_k_and_top_p():
    logits = jnp.log(jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.5, 0.3, 0.15, 0.05]) + 1e-9)[None].repeat(400, 0)
    keys = jax.random.split(jax.random.key(0), 3)
    assert set(np.asarray(sample(SamplingConfig(top_k=2), keys[0], logits)).tolist()) == {4, 5}
    assert set(np.asarray(sample(SamplingConfig(top_p=0.9), keys[1], logits)).tolist()) == {4, 5, 6}
    assert set(np.asarray(sample(SamplingConfig(temperature=0), keys[2], logits)).tolist()) == {4}


def test_errors():
    with pytest.raises(ValueError, match="cannot generate"):
        Decoder(dataclasses.replace(ENTROPY, stack=dataclasses.replace(LOCAL, causal=False)))
    with pytest.raises(ValueError, match="sees the future"):
        Decoder(MODEL, dataclasses.replace(PATCHER, mode="optimal"), ENTROPY)
    with pytest.raises(ValueError, match="needs an entropy model"):
        Decoder(MODEL, PATCHER)
    with pytest.raises(ValueError, match="at least one prompt"):
        generate(Decoder(ENTROPY), {}, [], max_new_bytes=3)
    with pytest.raises(ValueError, match="top_p"):
        SamplingConfig(top_p=0.0)
