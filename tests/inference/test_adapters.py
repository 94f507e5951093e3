"""Decoding with adapters: one for each row of a batch in one program; a byte at a time as the parallel pass."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Ema, Prefix, RouterConfig, attach, fuse
from jaxblt.adapters.code.fallback import CodeFallbackWarning
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.cli.generate import read_adapters
from jaxblt.inference import Decoder, SamplingConfig, generate
from jaxblt.inference.generate import _begin
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, make_patches
from tests.inference.forced import teacher_force
from tests.parameters import drawn
from tests.tolerances import assert_close

SITES = ("mlp/down", "mixer/out")
HEADS = AttentionConfig(dim=8, num_heads=2)
BASE = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern="A", mixers={"A": HEADS}, mlp_dim=12))
ROUTER = RouterConfig(reads=(ChunkMean(),), chunk=4, hidden=4)
BANK = attach(BASE, AdapterConfig(sites=SITES, rank=4, blocks=2, alpha=16.0, router=ROUTER))
PROMPTS = [b"abc", b"a longer prompt"]
SEED = 1
"""Of parameters whose four codes continue both prompts in four ways."""


@pytest.fixture(scope="module")
def params():
    return drawn(BANK.build(), jnp.zeros((1, 8), jnp.int32), seed=SEED)["params"]


def continued(config, params, limits=16, **options):
    greedy = SamplingConfig(temperature=0)
    return generate(
        Decoder(config), {"model": params}, PROMPTS, max_new_bytes=limits, sampling=greedy, **options
    )


@pytest.mark.slow(days=28, group="costly", turn="inference/test_adapters")
def test_each_row_has_the_logits_of_its_merged_adapter(params):
    """Two experts, the base and the static code; the router's own where none is chosen."""
    ids = jnp.asarray(np.tile(np.random.default_rng(0).integers(4, 260, 12), (5, 1)), jnp.int32)
    chosen = choose_adapters(BANK, [0, 1, "base", "static", None])
    run, plain = (jax.jit(lambda v, ids, m=c.build(): m.apply(v, ids)[0]) for c in (BANK, BASE))
    found, routed = run({"params": params, "chosen": chosen}, ids), run({"params": params}, ids)
    for row, code in enumerate(([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.5])):
        merged = fuse(BANK, params, code=jnp.asarray(code))[1]
        assert_close(found[row], plain({"params": merged}, ids)[row], n=12 * 8)
        assert not np.allclose(found[row], routed[row], atol=1e-2)
    np.testing.assert_array_equal(found[4], routed[4])


@pytest.mark.slow(days=28, group="costly", turn="inference/test_adapters")
def test_rows_change_their_adapters_without_a_new_program(params):
    names = (0, 1, "base", None)
    alone = {name: continued(BANK, params, adapters=[name] * 2) for name in names}
    programs = _begin._cache_size()
    for row in range(2):
        assert len({found[row] for found in alone.values()}) == len(alone)
    for pair in ((0, 1), (1, None), ("base", 0)):
        found = continued(BANK, params, adapters=pair)
        assert found == [alone[name][row] for row, name in enumerate(pair)]
    assert continued(BANK, params, adapters=1) == alone[1]
    assert _begin._cache_size() == programs


@pytest.mark.slow(days=28, group="costly", turn="inference/test_adapters")
def test_a_code_that_is_not_finite_is_the_fallback_and_told(params):
    """Of a router with NaN, codes of the first chunk are the fallback anyway: the first prompt reads no more."""
    dense = params["stack"]["router"]["code"]
    router = params["stack"]["router"] | {"code": dense | {"bias": dense["bias"].at[1].set(jnp.nan)}}
    broken = {**params, "stack": params["stack"] | {"router": router}}
    limits, words = [1, 16], r"codes of 1 of 2 rows were not finite, at 27 tokens of rows \[1\]"
    expected = continued(BANK, params, adapters=["static"] * 2, limits=limits)
    programs = _begin._cache_size()
    with pytest.warns(
        CodeFallbackWarning, match=f"{words}: .*; parameters model/stack/router/code/bias hold NaN"
    ):
        assert continued(BANK, broken, adapters=[None, None], limits=limits) == expected
    assert _begin._cache_size() == programs
    assert [len(text) for text in expected] == [1, 16]


@pytest.mark.slow(days=28, group="decoding")
def test_a_patched_model_s_bytes_one_by_one_equal_the_parallel_pass_given_its_patches():
    """Chunks of the latent stack count slots, so decoding has to feed it the holes that the parallel pass has."""
    local = dataclasses.replace(BASE.stack, pattern="W", mixers={"W": dataclasses.replace(HEADS, window=6)})
    blt = BLTConfig(local, BASE.stack, local, hash=None, bridge_heads=2)
    router = dataclasses.replace(ROUTER, chunk=3, reads=(ChunkMean(), Prefix(5)))
    config = attach(blt, AdapterConfig(rank=2, router=router, code=(Ema(0.5),)), stacks=("latent", "decoder"))
    patcher = PatcherConfig(mode="space", block_size=16, capacity=8)
    text = (
        b"it was a cold day, and all of the town was out",
        b"One. Two, three: four; and then five of them!!",
    )
    ids = jnp.asarray([[byte + 4 for byte in row] for row in text], jnp.int32)
    patches = jax.jit(partial(make_patches, patcher))(ids)
    params = drawn(config.build(), ids, patches=patches)["params"]
    whole = jax.jit(lambda params: config.build().apply({"params": params}, ids, patches=patches)[0])(params)
    step = jax.jit(lambda p: teacher_force(Decoder(config, patcher), {"model": p}, ids, jnp.ones_like(ids)))
    logits, closed = step(params)
    np.testing.assert_array_equal(closed, np.asarray(patches.closed).reshape(2, -1)[:, : ids.shape[1]])
    assert_close(logits, whole, n=1024)
    router = jax.tree.map(lambda leaf: -leaf, params["latent"]["router"])
    other = {**params, "latent": params["latent"] | {"router": router}}
    assert not np.allclose(step(other)[0], whole, atol=1e-2)


def test_words_of_the_command_line():
    assert read_adapters(("1", "base", "static", "router")) == [1, "base", "static", None]
    assert read_adapters(("1",)) == 1
    assert read_adapters(()) is None


def test_codes_of_rows():
    found = choose_adapters(BANK, [1, "static", "base", None])["stack"]["router"]
    np.testing.assert_array_equal(found["code"], [[0, 1], [0.5, 0.5], [0, 0], [0, 0]])
    np.testing.assert_array_equal(found["taken"], [True, True, True, False])
    free = attach(BASE, AdapterConfig(rank=2, router=ROUTER))
    np.testing.assert_array_equal(choose_adapters(free, ["static"])["stack"]["router"]["code"], [[1, 1]])


@pytest.mark.parametrize(("rows", "given"), [(3, 1), (1, 2)])
def test_adapters_of_other_rows_are_refused(rows, given):
    """One row's would be the adapter of all rows."""
    ids, chosen = jnp.zeros((rows, 4), jnp.int32), choose_adapters(BANK, ["static"] * given)
    module = BANK.build()
    with pytest.raises(ValueError, match=f"chosen for {given} rows of 2 numbers, and x has {rows} rows of 2"):
        jax.eval_shape(
            lambda key: module.apply({**module.init(key, ids), "chosen": chosen}, ids), jax.random.key(0)
        )


@pytest.mark.parametrize(
    ("config", "adapters", "words"),
    [
        (BANK, 2, "adapter 2 of a row: expected a number from 0 to 1, 'base', 'static' or None"),
        (BANK, [0, "bas"], "adapter 'bas' of a row"),
        (BANK, [0], "adapters must be one adapter, or one for each of the 2 prompts, got 1"),
        (
            attach(BASE, AdapterConfig(rank=2, router=ROUTER)),
            0,
            "adapter 0 of a row: expected 'base', 'static'",
        ),
        (attach(BASE, AdapterConfig(rank=2)), "base", "ByteLMConfig has no router: leave adapters out"),
    ],
)
def test_what_is_refused(config, adapters, words):
    with pytest.raises(ValueError, match=words):
        continued(config, {}, adapters=adapters)
