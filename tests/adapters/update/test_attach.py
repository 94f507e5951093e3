"""Attaching, merging and splitting; what an adapter refuses; transforms of codes."""

import dataclasses
import os
import subprocess
import sys
import zlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Clamp,
    Confidence,
    Ema,
    Prefix,
    RouterConfig,
    Side,
    TopK,
    attach,
    detach,
    find_sites,
    fuse,
    join_params,
    split_params,
)
from jaxblt.adapters.code.router import Router
from jaxblt.mixers import AttentionConfig, HyenaConfig, ImplicitFilter
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.testing import check_adapter
from jaxblt.training.stored.serialize import from_json, to_json

ROOT = Path(__file__).resolve().parents[3]
STACK = StackConfig(
    dim=8, num_layers=3, pattern="HA", mixers={"A": AttentionConfig(dim=8, num_heads=2)}, mlp_dim=16
)
MODEL = ByteLMConfig(stack=STACK)
ROUTED = AdapterConfig(
    rank=2,
    router=RouterConfig(chunk=4, reads=(ChunkMean(), Prefix(3)), hidden=8),
    code=(Ema(0.5), Clamp(2.0)),
)


def shapes_of(model):
    ids = jnp.zeros((1, 8), jnp.int32)
    return nn.meta.unbox(jax.eval_shape(model.build().init, jax.random.key(0), ids))["params"]


def test_sites_are_the_products_of_tokens_in_a_block():
    found = {(site.kind, site.name): (site.inputs, site.outputs) for site in find_sites(STACK)}
    assert found["H", "mixer/in"] == (8, 24)
    assert found["A", "mixer/q"] == (8, 8)
    assert found["A", "mlp/down"] == (16, 8)
    hyena = HyenaConfig(dim=8, filter=ImplicitFilter(filter_len=8))
    implicit = dataclasses.replace(STACK, pattern="I", mixers={"I": hyena})
    assert {site.name for site in find_sites(implicit)} >= {"mixer/in", "mixer/out"}
    assert not [site.name for site in find_sites(implicit) if "long" in site.name]


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_the_names_of_the_base_stay_and_a_config_comes_back_from_json():
    config = attach(MODEL, ROUTED)
    base, trained = split_params(shapes_of(config))
    plain = shapes_of(MODEL)
    assert base == plain
    assert join_params(base, trained) == shapes_of(config)
    assert trained["stack"].keys() == {"periods", "rest", "router"}
    assert split_params(plain)[1] == {}
    assert detach(config) == MODEL
    assert from_json(to_json(config)) == config
    assert attach(config, AdapterConfig()).stack.adapter.router is None


def test_an_adapter_goes_to_the_stacks_that_are_named():
    config = attach(BLTConfig(), AdapterConfig(), stacks=("latent", "decoder"))
    assert config.encoder.adapter is None
    assert config.latent.adapter == config.decoder.adapter == AdapterConfig()
    assert attach(BLTConfig(), AdapterConfig(), stacks="latent").decoder.adapter is None


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_sites_of_other_ranks():
    config = attach(MODEL, AdapterConfig(sites=("mixer/*", ("mlp/down", 4)), rank=2))
    block = split_params(shapes_of(config))[1]["stack"]["rest"]["block_0"]
    assert block["mixer"]["in"]["adapter"]["v"].shape == (8, 2)
    assert block["mlp"]["down"]["adapter"]["u"].shape == (4, 8)
    bank = dataclasses.replace(ROUTED, sites=("mixer/*", ("mlp/down", 4)), blocks=2, code=())
    assert attach(MODEL, bank).stack.adapter.scale(4) == 16.0 * 2 / 4


def test_side_features_go_to_a_model_that_takes_them():
    class Sided(nn.Module):
        def __call__(self, ids, *, side=None): ...

    @dataclasses.dataclass(frozen=True)
    class SidedConfig:
        stack: StackConfig = STACK

        def build(self):
            return Sided()

    reads = dataclasses.replace(ROUTED, router=RouterConfig(reads=(ChunkMean(), Side(2))))
    assert attach(SidedConfig(), reads).stack.adapter == reads


def adapter(**options):
    return AdapterConfig(**options)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: attach(MODEL, adapter(sites=("mixer/quary", "mlp/*"))),
            r"pattern 'mixer/quary' matches no product; the nearest names are \['mixer/",
        ),
        (
            lambda: attach(MODEL, adapter(sites=("mlp/*", ("mlp/down", 4)))),
            r"site 'mlp/down' of stack 'stack' is given ranks \[4, 8\]",
        ),
        (lambda: attach(MODEL, adapter(rank=9)), "rank 9 at site 'mixer/in' .* its 8 inputs or 24 outputs"),
        (
            lambda: attach(MODEL, adapter(), ("latent",)),
            r"stacks \['latent'\] of ByteLMConfig: .*\['stack'\]",
        ),
        (
            lambda: attach(BLTConfig(), adapter(router=RouterConfig(reads=(ChunkMean(), Side(2)))), "latent"),
            r"routers read \{'latent': 2\} side features by stack, and the model of BLTConfig takes none: .*call a",
        ),
        (lambda: adapter(sites=(("mlp/*", 0),)), "rank of 'mlp/\\*' must be at least 1, got 0"),
        (lambda: adapter(blocks=2), "router is None: set RouterConfig"),
        (
            lambda: adapter(rank=6, blocks=4, router=RouterConfig()),
            "rank 6 .* does not divide into blocks = 4",
        ),
        (
            lambda: adapter(sites=(("mlp/*", 4),), router=RouterConfig()),
            "rank 4 where the router's code has 8 numbers: set blocks",
        ),
        (lambda: adapter(router=RouterConfig(), code=(TopK(9),)), "TopK.k = 9 numbers of a code that has 8"),
        (lambda: adapter(router=RouterConfig(), code=("clamp",)), "must hold transforms such as Clamp"),
        (
            lambda: adapter(router=RouterConfig(), code=(Ema,)),
            r"must hold transforms such as Clamp\(3\.0\), got <class '.*Ema'>: call it, Ema\(\.\.\.\)",
        ),
        (
            lambda: adapter(router=RouterConfig(), code=Ema()),
            r"tuple of transforms such as \(Clamp\(3\.0\),\), got Ema\(decay=0\.9\): put it in a tuple",
        ),
        (
            lambda: adapter(router=RouterConfig(level="prefix"), code=(Ema(),)),
            "level 'prefix' gives it one: leave it out",
        ),
        (lambda: dataclasses.replace(STACK, adapter="lora"), "must be an AdapterConfig or None, got 'lora'"),
        (
            lambda: dataclasses.replace(STACK, pattern="A", causal=False, adapter=ROUTED),
            "causal=False and layout 'contiguous': set router=None",
        ),
        (lambda: check_adapter(STACK), "the stack has no adapter to check"),
        (lambda: check_adapter(attach(MODEL, ROUTED).stack, only=("causl",)), "no property is called"),
    ],
)
def test_what_is_refused(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.slow(days=28, group="costly")
def test_merging_asks_for_the_code_of_a_routed_adapter():
    config = attach(MODEL, ROUTED)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes_of(config))
    with pytest.raises(ValueError, match="another weight at every code: give code, 2 numbers"):
        fuse(config, params)
    with pytest.raises(ValueError, match=r"code must have shape \(2,\), one number a block, got \(3,\)"):
        fuse(config, params, code=jnp.ones(3))
    with pytest.raises(ValueError, match=r"code must be finite, or every weight is lost, got \[ 1. nan\]"):
        fuse(config, params, code=jnp.asarray([1.0, jnp.nan]))
    with pytest.raises(ValueError, match="has no router: leave it None"):
        fuse(attach(MODEL, AdapterConfig()), params, code=jnp.ones(2))
    with pytest.raises(ValueError, match="no parameters of it: load them first"):
        fuse(config, split_params(params)[0], code=jnp.ones(2))


def codes(config, length=40):
    """Codes of a row of two documents, the second from step 26 on; a parameter is drawn by its path."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, length, 6)).astype(np.float32))
    ids = jnp.asarray(np.repeat([1, 2], [26, length - 26])[None].astype(np.int32))
    module = Router(config)

    def draw(path, shape):
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jnp.asarray(rng.standard_normal(shape.shape).astype(shape.dtype))

    shapes = nn.meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))["params"]
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    return np.asarray(jax.jit(module.apply)({"params": params}, x, segment_ids=ids)[0])[0]  # type: ignore[index]


ROUTER = RouterConfig(level="chunk", chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4)
FREE = AdapterConfig(rank=4, router=ROUTER)
BANK = AdapterConfig(rank=8, blocks=4, router=ROUTER)


def chunks(code):
    """The code of each chunk of both documents, once all its tokens are found to have it."""
    parts = [
        code[start : min(start + 5, stop)]
        for first, stop in ((0, 26), (26, 40))
        for start in range(first, stop, 5)
    ]
    for part in parts:
        np.testing.assert_array_equal(part, np.broadcast_to(part[:1], part.shape))
    return np.stack([part[0] for part in parts])


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_a_chunk_has_one_code_and_a_document_starts_at_the_fallback():
    for config, start in ((FREE, 1.0), (BANK, 0.25)):
        found = chunks(codes(config))
        assert {*np.unique(found[[0, 6]])} == {np.float32(start)}
        others = np.delete(found, [0, 6], 0)
        assert len(np.unique(others, axis=0)) == len(others)
    np.testing.assert_allclose(chunks(codes(BANK)).sum(1), 1, atol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_ema_is_its_closed_form_in_each_document():
    plain, smooth = chunks(codes(FREE)), chunks(codes(dataclasses.replace(FREE, code=(Ema(0.75),))))
    for rows in (slice(0, 6), slice(6, 9)):
        e, expected = np.ones(4), []
        for k, c in enumerate(plain[rows]):
            e = e if k == 0 else 0.75 * e + 0.25 * c
            expected.append(e)
        np.testing.assert_allclose(smooth[rows], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_clamp_bounds_the_root_mean_square_and_top_k_the_numbers():
    plain, clamped = (codes(dataclasses.replace(FREE, code=code)) for code in ((), (Clamp(1.5),)))
    rms = lambda c: np.sqrt(np.mean(c**2, -1))  # noqa: E731
    assert rms(plain).max() > 2
    np.testing.assert_allclose(rms(clamped), np.minimum(rms(plain), 1.5), rtol=1e-5)
    full, two = (codes(dataclasses.replace(BANK, code=code)) for code in ((TopK(4),), (TopK(2),)))
    np.testing.assert_allclose(full, codes(BANK), rtol=1e-6)
    assert {*np.unique(np.sum(two > 0, -1))} == {2}
    np.testing.assert_allclose(two.sum(-1), 1, rtol=1e-6)


@pytest.mark.slow(days=28, group="costly", turn="adapters/update/test_attach")
def test_confidence_stands_between_the_fallback_and_the_code():
    plain, sure = codes(FREE), codes(dataclasses.replace(FREE, code=(Confidence(),)))
    known = np.abs(plain - 1) > 1e-3
    share = (sure[known] - 1) / (plain[known] - 1)
    assert share.min() > 0
    assert share.max() < 1
    assert share.max() > 2 * share.min()


def test_the_gradient_of_a_clamped_code_of_zero_is_finite():
    apply = lambda c: jnp.sum(Clamp(1.0).apply(Router(FREE), "", c, None, None, ())[0] ** 2)  # noqa: E731
    assert np.isfinite(jax.grad(apply)(jnp.zeros((1, 1, 3)))).all()


BUILD_ALL = """
import jax, configs
from jaxblt.adapters import AdapterConfig, attach
for name in configs.RECIPES:
    recipe = configs.get(name)
    recipe.model.build(dtype=recipe.train.compute_dtype, patcher=recipe.patcher)
    if name in ("demo", "ecoli"):
        attach(recipe.model, AdapterConfig())
    print(name)
jax.devices()
"""


@pytest.mark.slow(days=28, group="costly")
def test_no_recipe_and_no_adapter_starts_a_backend() -> None:
    """Several processes join before: `jax.distributed.initialize` refuses to come later."""
    command, env = [sys.executable, "-c", BUILD_ALL], {**os.environ, "JAX_PLATFORMS": "none"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == list(configs.RECIPES), done.stderr
    assert "Unable to initialize backend 'none'" in done.stderr
