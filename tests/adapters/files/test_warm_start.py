"""A bank that starts from given LoRAs: exact at their rank, best at a smaller one, and open ranks that can learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Governor,
    RouterConfig,
    attach,
    fuse,
    split_params,
    warm_start,
)
from jaxblt.models import ByteLMConfig, StackConfig
from tests.parameters import drawn

BASE = ByteLMConfig(stack=StackConfig(dim=8, num_layers=3, pattern=("recurrence", "recurrence"), mlp_dim=12))
SITES = ("mlp/down", "mixer/out")
RANKS = (2, 3)
IDS = jnp.zeros((1, 8), jnp.int32)


def lora(rank, alpha=3.0):
    return attach(BASE, AdapterConfig(sites=SITES, rank=rank, alpha=alpha))


def bank(block, alpha=5.0, **options):
    adapter = AdapterConfig(
        sites=SITES,
        rank=2 * block,
        blocks=2,
        alpha=alpha,
        router=RouterConfig(reads=(ChunkMean(),), hidden=4),
        **options,
    )
    return attach(BASE, adapter)


def init(config, seed=0):
    return drawn(config.build(), IDS, seed=seed)["params"]


@pytest.fixture(scope="module")
def given():
    """Two LoRAs of rank 2 and 3, with all parameters of their models."""
    return [(lora(rank), init(lora(rank), seed=rank)) for rank in RANKS]


def updates(config, params, **options):
    """dW of every site and layer."""
    merged, plain = fuse(config, params, **options)[1], split_params(params)[0]
    found = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), merged, plain)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree.leaves_with_path(found["stack"])
        if np.abs(leaf).max() > 1e-4
    }


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_warm_start")
@pytest.mark.parametrize("block", [3, 2])
def test_a_one_hot_code_gives_the_update_of_a_lora(given, block):
    """Exactly where the block has its rank; a smaller block keeps the largest singular values."""
    config = bank(block)
    params = init(config, seed=7)
    started = warm_start(config, params, given)
    assert jax.tree.structure(started) == jax.tree.structure(params)
    np.testing.assert_array_equal(
        started["stack"]["router"]["code"]["kernel"], params["stack"]["router"]["code"]["kernel"]
    )
    for expert, (static, own) in enumerate(given):
        wanted = updates(static, own)
        found = updates(config, started, code=jnp.eye(2)[expert])
        assert found.keys() == wanted.keys()
        assert len(found) == 6
        for name, update in wanted.items():
            rows = (x.reshape(-1, *x.shape[-2:]) for x in (update, found[name]))
            for one, two in zip(*rows, strict=True):
                sizes = np.linalg.svd(one)[1]
                lost = np.sqrt((sizes[block:] ** 2).sum())
                np.testing.assert_allclose(np.linalg.norm(two - one), lost, rtol=1e-3, atol=3e-6 * sizes[0])
                assert sizes[RANKS[expert] - 1] > 1e-2


@pytest.mark.slow(days=28, group="costly", turn="adapters/files/test_warm_start")
def test_ranks_that_are_left_can_learn(given):
    """V as it was drawn and U = 0: nothing is added, and U has a gradient."""
    config = bank(4)
    params = init(config, seed=7)
    started = warm_start(config, split_params(params)[1], given)
    down, before = (
        tree["stack"]["periods"]["block_0"]["mlp"]["down"]["adapter"] for tree in (started, params)
    )
    np.testing.assert_array_equal(down["v"][..., 2:4], before["v"][..., 2:4])
    assert (np.asarray(down["u"])[:, 2:4] == 0).all()
    assert (np.asarray(down["u"])[:, [0, 1, 4, 5, 6]] != 0).all()
    gram = np.asarray(down["v"][0, :, :2]).T @ np.asarray(down["v"][0, :, :2])
    np.testing.assert_allclose(gram, np.eye(2), atol=1e-5)


def test_what_is_refused(given):
    config = bank(2)
    params = init(config)
    with pytest.raises(
        ValueError, match=r"1 LoRAs are to start the experts of stack 'stack', .* set blocks=1"
    ):
        warm_start(config, params, given[:1])
    with pytest.raises(ValueError, match="loras is empty: give a LoRA for each expert of the bank"):
        warm_start(config, params, [])
    governed = bank(2, governor=Governor())
    with pytest.raises(ValueError, match="set blocks=2 and governor=None"):
        warm_start(governed, params, given)
    with pytest.raises(ValueError, match=r"loras\[1\] has an adapter with a router on stack 'stack'"):
        warm_start(config, params, [given[0], (config, params)])
    fewer = attach(BASE, dataclasses.replace(lora(2).stack.adapter, sites=("mlp/down",)))
    with pytest.raises(ValueError, match=r"loras\[0\] has no adapter at stack/.*mixer/out: use the sites"):
        warm_start(config, params, [(fewer, init(fewer)), given[1]])
    more = attach(BASE, dataclasses.replace(lora(2).stack.adapter, sites=(*SITES, "mlp/up")))
    with pytest.raises(
        ValueError, match=r"loras\[0\] has an adapter at stack/.*mlp/up \(3 such sites\), where"
    ):
        warm_start(config, params, [(more, init(more)), given[1]])
