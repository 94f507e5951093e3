"""A run whose rows end before a router's first code is refused before it begins."""

import jax
import pytest

from jaxblt.adapters import AdapterConfig, ChunkMean, Prefix, RouterConfig, attach
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.training.loop import fit
from jaxblt.training.start.setup import make_setup
from tests.training.tiny import Letters, tiny_recipe

STACK = StackConfig(
    dim=8, num_layers=2, pattern="A", mixers={"A": AttentionConfig(dim=8, num_heads=2)}, mlp_dim=8
)
MODEL = ByteLMConfig(stack=STACK)
LENGTH = 32
"""Bytes of a row of `tiny_recipe`."""


def set_up(router, **options):
    model = attach(MODEL, AdapterConfig(sites=("mlp/*",), rank=2, router=router, **options))
    return make_setup(tiny_recipe(model=model), make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    ("router", "options", "words"),
    [
        (
            RouterConfig(chunk=LENGTH),
            {},
            r"'stack/router' .* 32 steps .* at step 32 .*lag \* chunk = 1 \* 32\): lower",
        ),
        (RouterConfig(chunk=11, lag=3), {}, r"at step 33 \(RouterConfig.lag \* chunk = 3 \* 11\)"),
        (
            RouterConfig("prefix", reads=(ChunkMean(), Prefix(LENGTH))),
            {},
            r"at step 32 \(Prefix.steps = 32\)",
        ),
        (
            RouterConfig(Mixed(("prefix", "chunk")), reads=(ChunkMean(), Prefix(48))),
            {},
            r"at step 48 \(Prefix.steps = 48\)",
        ),
        (RouterConfig(chunk=64, per="block"), {}, "router 'stack/.*block_0/router' never gives a code"),
        (
            RouterConfig(),
            {"levels": (("mlp/up", "token"),)},
            "router 'stack/router/chunk' never gives a code",
        ),
    ],
)
def test_rows_that_end_before_the_first_code(router, options, words):
    with pytest.raises(ValueError, match=words):
        set_up(router, **options)


@pytest.mark.parametrize(
    "router",
    [
        RouterConfig(chunk=LENGTH - 1),
        RouterConfig("prefix", reads=(ChunkMean(), Prefix(LENGTH - 1))),
        RouterConfig("token"),
        RouterConfig(Mixed(("prefix", "chunk")), reads=(ChunkMean(), Prefix(128)), chunk=16),
    ],
)
def test_rows_that_hold_a_code_at_their_last_step(router):
    set_up(router)


@pytest.mark.slow(days=28, group="costly")
def test_slots_of_patches_are_the_steps_of_a_latent_stack():
    """Rows of 32 bytes have 8 slots: a code at step 8 never comes in the latent stack, and does in the decoder."""
    model = BLTConfig(encoder=STACK, latent=STACK, decoder=STACK)
    router = RouterConfig(chunk=8, reads=(ChunkMean(),))
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=16, capacity=4)
    for name in ("latent", "decoder"):
        adapter = AdapterConfig(sites=("mlp/*",), rank=2, router=router)
        recipe = tiny_recipe(model=attach(model, adapter, name), patcher=patcher)
        mesh = make_mesh(devices=jax.devices()[:1])
        if name == "decoder":
            make_setup(recipe, mesh)
            continue
        with pytest.raises(
            ValueError, match=r"'latent/router' never gives a code: rows have 8 steps \(bytes or slots"
        ):
            make_setup(recipe, mesh)


@pytest.mark.slow(days=28, group="costly")
def test_nothing_is_written(tmp_path):
    recipe = tiny_recipe(model=attach(MODEL, AdapterConfig(sites=("mlp/*",), rank=2, router=RouterConfig())))
    with pytest.raises(ValueError, match=r"rows have 32 steps .* first code comes at step 64"):
        fit(recipe, tmp_path / "run", source=Letters(), devices=jax.devices()[:1])
    assert not (tmp_path / "run").exists()
