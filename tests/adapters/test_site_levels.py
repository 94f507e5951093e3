"""Sites of one stack whose codes come at different levels: each has the code of its own router."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Ema,
    Neighbours,
    Prefix,
    RouterConfig,
    attach,
    distill,
    fuse,
    join_params,
    load_peft,
    mean_codes,
    save_peft,
    split_params,
)
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.adapters.update.params import routers
from jaxblt.adapters.update.row_adapters import choose_adapters
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.stored.serialize import from_json, to_json
from tests.parameters import drawn
from tests.tolerances import assert_close

HEADS = AttentionConfig(dim=8, num_heads=2)
STACK = StackConfig(dim=8, num_layers=1, pattern="A", mixers={"A": HEADS}, mlp_dim=12)
BASE = ByteLMConfig(stack=STACK)
ROUTER = RouterConfig(chunk=4, reads=(ChunkMean(),), hidden=4)
LEVELS = AdapterConfig(
    sites=("mixer/[qkv]", "mlp/down"), rank=2, router=ROUTER, levels=(("mlp/*", "token"),), code=(Ema(0.5),)
)
MODEL = attach(BASE, LEVELS)
IDS = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 12)), jnp.int32)


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL.build(), IDS, seed=0)["params"]


@pytest.fixture(scope="module")
def passed(params):
    """Logits, and what was sowed."""
    run = jax.jit(lambda params: MODEL.build().apply({"params": params}, IDS, mutable=["metrics"]))
    (logits, _), side = run(params)
    return logits, side


def logits_of(config, params):
    return jax.jit(lambda params: config.build().apply({"params": params}, IDS)[0])(params)


def silent(params, *names):
    """Parameters with U = 0 at the sites of these parts of a block."""

    def quiet(path, leaf):
        keys = {entry.key for entry in path}
        return jnp.zeros_like(leaf) if path[-1].key == "u" and keys & set(names) else leaf

    return jax.tree_util.tree_map_with_path(quiet, params)


@pytest.mark.slow(days=28, group="codes and sites of adapters")
@pytest.mark.parametrize(
    ("level", "sites", "off"), [("chunk", "mixer/[qkv]", "mlp"), ("token", "mlp/down", "mixer")]
)
def test_a_site_has_the_code_of_its_level(params, level, sites, off):
    """Without the others' updates a level's sites do what they do in an adapter of that level alone."""
    router = dataclasses.replace(ROUTER, level=level)
    alone = attach(BASE, dataclasses.replace(LEVELS, sites=(sites,), router=router, levels=()))
    base, trained = split_params(params)
    del trained["stack"]["periods"]["block_0"][off]
    own = join_params(base, {"stack": trained["stack"] | {"router": params["stack"]["router"][level]}})
    found = logits_of(MODEL, silent(params, off))
    assert_close(found, logits_of(alone, own), n=12 * 8)
    assert not np.allclose(found, logits_of(BASE, base), atol=1e-2)


@pytest.mark.slow(days=28, group="costly")
def test_it_is_merged_and_distilled_at_a_code_for_each_level(params, passed, tmp_path):
    codes = mean_codes(passed[1])["stack"]
    assert codes.shape == (4,)
    static, distilled = distill(MODEL, params, codes)
    config, merged = fuse(MODEL, params, code=codes)
    assert config == BASE
    assert_close(logits_of(static, distilled), logits_of(BASE, merged), n=12 * 8)
    block = lambda tree: tree["stack"]["periods"]["block_0"]  # noqa: E731
    for name, code in (("mixer", codes[:2]), ("mlp", codes[2:])):
        site = block(params)[name]["q" if name == "mixer" else "down"]
        v, u = site["adapter"]["v"][0], site["adapter"]["u"][0]
        update = ((v * code[None]) @ u.reshape(2, -1)).reshape(site["kernel"][0].shape) * LEVELS.scale(2)
        after = block(merged)[name]["q" if name == "mixer" else "down"]["kernel"][0]
        np.testing.assert_allclose(after, site["kernel"][0] + update, atol=1e-5)
    save_peft(tmp_path / "a", MODEL, params, code=codes)
    plain = attach(BASE, AdapterConfig(sites=LEVELS.sites, rank=2))
    loaded = fuse(plain, join_params(split_params(params)[0], load_peft(tmp_path / "a", plain)))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), loaded, merged)
    with pytest.raises(
        ValueError, match=r"shape \(4,\), one number a block for each level of \('chunk', 'token'\)"
    ):
        fuse(MODEL, params, code=jnp.ones(2))


@pytest.mark.slow(days=28, group="costly")
def test_rows_choose_a_code_for_all_levels(params):
    chosen = choose_adapters(MODEL, ["base", "static"])
    assert chosen["stack"]["router"].keys() == {"chunk", "token"}
    run = jax.jit(lambda params, chosen: MODEL.build().apply({"params": params, "chosen": chosen}, IDS)[0])
    found = run(params, chosen)
    for row, code in enumerate((jnp.zeros(4), jnp.ones(4))):
        assert_close(found[row], logits_of(BASE, fuse(MODEL, params, code=code)[1])[row], n=12 * 8)


def test_what_is_stored_and_said():
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = lambda c: nn.meta.unbox(jax.eval_shape(c.build().init, jax.random.key(0), ids))["params"]  # noqa: E731
    base, trained = split_params(shapes(MODEL))
    assert base == shapes(BASE)
    assert routers(trained)["stack"]["router"].keys() == {"chunk", "token"}
    assert from_json(to_json(MODEL)) == MODEL
    assert describe_sites(MODEL, 100, 0, 1000)[1:3] == [
        "levels          stack, chunk: mixer/q, mixer/k, mixer/v",
        "levels          stack, token: mlp/down",
    ]


def adapter(**changes):
    return dataclasses.replace(LEVELS, **changes)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: adapter(router=None, code=()), "are of a router without an index, and router is None"),
        (
            lambda: adapter(router=dataclasses.replace(ROUTER, reads=(ChunkMean(), Neighbours("i")))),
            "are of a router without an index",
        ),
        (lambda: adapter(levels=(("mlp/*", "chunk"),)), "names 'chunk', the router's level"),
        (
            lambda: adapter(levels=(("mlp/*", "prefix"),)),
            r"holds nothing that level 'prefix' reads: add Prefix",
        ),
        (
            lambda: attach(BASE, adapter(levels=(("mlp/up", "token"),))),
            r"level pattern 'mlp/up' matches no site; the nearest names are \['mlp/down'",
        ),
        (
            lambda: attach(
                BASE,
                adapter(
                    router=dataclasses.replace(ROUTER, reads=(ChunkMean(), Prefix(2))),
                    code=(),
                    levels=(("mlp/*", "token"), ("*down", "prefix")),
                ),
            ),
            r"site 'mlp/down' is given levels \['prefix', 'token'\]",
        ),
        (lambda: attach(BASE, adapter(levels=(("*", "token"),))), "leave no site to the router's own level"),
    ],
)
def test_what_is_refused(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)
