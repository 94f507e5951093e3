"""Caches that requests share: what is counted is what decoders hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Clamp,
    Ema,
    Prefix,
    RouterConfig,
    Sticky,
    TopK,
    attach,
)
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.adapters.files.shared_caches import first_code, shared_prefixes
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.data.vocab import encode
from jaxblt.inference import Decoder, prefill
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from tests.parameters import drawn

HEADS = AttentionConfig(dim=8, num_heads=2)
BASE = ByteLMConfig(stack=StackConfig(dim=8, num_layers=2, pattern="A", mixers={"A": HEADS}, mlp_dim=12))
ROUTER = RouterConfig(chunk=4, reads=(ChunkMean(), Prefix(6)), hidden=4, fallback=0.0)
BANK = AdapterConfig(rank=4, blocks=2, router=ROUTER)
TEXT = b"the same beginning, then"
ROWS = (None, "base", "static", 1, None)
PROMPTS = [TEXT] * 4 + [TEXT[:9] + b"another tail..."]


def bank(**changes):
    own = {name: changes.pop(name) for name in ("code", "levels") if name in changes}
    return dataclasses.replace(BANK, router=dataclasses.replace(ROUTER, **changes), **own)


CASES = {
    "chunk": (bank(code=(Ema(0.5), Clamp(3.0))), 4),
    "ahead": (bank(lag=2), 8),
    "prefix": (bank(level="prefix"), 6),
    "levels of sites": (bank(level="prefix", levels=(("mlp/*", "chunk"),)), 4),
    "blocks": (bank(per="block", lag=3), 12),
    "token": (bank(level="token"), 0),
}


def held(model, adapters):
    """Leading tokens whose keys and values are equal in two rows, from caches of the prompts."""
    ids = jnp.asarray(np.stack([encode(prompt, bos=True) for prompt in PROMPTS]), jnp.int32)
    params = {"model": drawn(model.build(), ids[:1])["params"], "chosen": choose_adapters(model, adapters)}
    read = jax.jit(
        lambda params, ids: prefill(Decoder(model), params, ids, jnp.ones_like(ids), num_bytes=64)[1]
    )
    leaves = jax.tree.leaves(read(params, ids).model.stack.periods)
    caches = [np.asarray(leaf) for leaf in leaves if leaf.ndim == 5]
    assert len(caches) == 2
    assert {leaf.shape[:2] for leaf in caches} == {(2, len(PROMPTS))}
    axis = next(i for i, size in enumerate(caches[0].shape[2:], 2) if size >= ids.shape[1])
    tokens = [np.moveaxis(leaf, axis, 2)[:, :, : ids.shape[1]] for leaf in caches]
    flat = np.concatenate(
        [np.moveaxis(t, 2, 0).reshape(ids.shape[1], 2, len(PROMPTS), -1) for t in tokens], 1
    )

    def equal(i, j):
        apart = np.abs(flat[:, :, i] - flat[:, :, j]).max((1, 2))
        assert not ((apart > 1e-6) & (apart < 1e-4)).any()
        return int(np.argmax(apart > 1e-4)) if (apart > 1e-4).any() else len(apart)

    return equal


@pytest.mark.slow(days=28, group="codes and sites of adapters")
@pytest.mark.parametrize("name", CASES)
def test_what_is_counted_is_what_caches_hold(name):
    adapter, step = CASES[name]
    model = attach(BASE, adapter)
    equal = held(model, ROWS)
    assert equal(0, 1) == step == shared_prefixes(model, PROMPTS[:2], ROWS[:2]).shared[1]
    found = shared_prefixes(model, PROMPTS, ROWS)
    assert found.shared == [max([equal(i, j) for j in range(i)], default=0) for i in range(len(ROWS))]
    assert found.shared[4] == 10  # BOS and nine bytes of a row that has the router's codes, too
    assert found.lengths == [25] * 5
    assert found.rate == sum(found.shared) / 125


def test_the_first_code_of_a_mixture_is_that_of_its_first_level():
    levels = Mixed(levels=("prefix", "chunk"), by="length", at=(8.0,))
    assert first_code(dataclasses.replace(ROUTER, level=levels)) == 4
    assert first_code(dataclasses.replace(ROUTER, level=levels, lag=2)) == 6


@pytest.mark.parametrize(
    ("code", "shared"), [((), 4), ((Ema(0.5), Sticky(0.1)), 4), ((TopK(1),), 0), ((Clamp(3.0),), 0)]
)
def test_a_fallback_that_a_transform_may_change_is_not_counted(code, shared):
    model = attach(BASE, bank(fallback=1.0, code=code))
    assert shared_prefixes(model, [TEXT] * 2, [None, "static"]).shared == [0, shared]
    assert shared_prefixes(model, [TEXT] * 2, [None, "base"]).shared == [0, 0]


def test_models_as_they_are_share_equal_beginnings():
    """Also without adapters, and with patches: a stack of them is at its first code no sooner than in as many bytes."""
    assert shared_prefixes(BASE, [b"abcd", b"abxy", b"abcdef", b""]).shared == [0, 3, 5, 1]
    blt = attach(BLTConfig(), bank(chunk=64), stacks=("latent",))
    assert shared_prefixes(blt, [b"a" * 99] * 2, [None, "base"]).shared == [0, 64]


def test_what_is_refused():
    with pytest.raises(ValueError, match="one for each of the 2 prompts, got 1: give None to prompts"):
        shared_prefixes(BASE, [b"a", b"b"], [None])
    with pytest.raises(ValueError, match="has no router: leave adapters out"):
        shared_prefixes(BASE, [b"a", b"b"], [None, "base"])
    with pytest.raises(ValueError, match=r"adapter 2 of a row: expected a number from 0 to 1"):
        shared_prefixes(attach(BASE, BANK), [b"a", b"b"], [None, 2])
