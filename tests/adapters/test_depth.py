"""Ranks that differ from layer to layer."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.adapters import AdapterConfig, RouterConfig, attach, fuse, load_peft, save_peft, split_params
from jaxblt.adapters.files.peft import CONFIG
from jaxblt.adapters.update.attach import describe_sites
from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.testing import check_adapter
from jaxblt.training.stored.serialize import from_json, to_json
from tests.parameters import drawn

MIXERS = {"A": AttentionConfig(dim=8, num_heads=2), "S": HyenaConfig(dim=8, filter=ExplicitFilter(taps=3))}
STACK = StackConfig(dim=8, num_layers=3, pattern="S", mixers=MIXERS, mlp_dim=12, scan=False)
DEPTH = AdapterConfig(sites=("mixer/out", ("mlp/down", (1, 4, 2))), rank=2)
ADAPTED = dataclasses.replace(STACK, adapter=DEPTH)
IDS = jnp.zeros((1, 8), jnp.int32)


def shapes_of(config):
    return nn.meta.unbox(jax.eval_shape(config.build().init, jax.random.key(0), IDS))["params"]


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_depth")
def test_parameters_of_each_layer_and_names_of_the_base():
    config = attach(ByteLMConfig(stack=STACK), DEPTH)
    base, trained = split_params(shapes_of(config))
    assert base == shapes_of(ByteLMConfig(stack=STACK))
    found = [trained["stack"][f"period_{i}"]["block_0"]["mlp"]["down"]["adapter"] for i in range(3)]
    assert [tree["v"].shape for tree in found] == [(12, 1), (12, 4), (12, 2)]
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert count == 3 * 2 * (8 + 8) + (1 + 4 + 2) * (12 + 8)
    assert from_json(to_json(config)) == config
    assert describe_sites(config, count, 0, 1000)[:3] == [
        "adapters        stack, rank 1: S:mlp/down (layers 0)",
        "adapters        stack, rank 2: S:mixer/out, S:mlp/down (layers 2)",
        "adapters        stack, rank 4: S:mlp/down (layers 1)",
    ]


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_depth")
def test_it_starts_as_the_base_is_its_weight_update_and_learns():
    only = ("start", "dense", "overfits")
    assert check_adapter(ADAPTED, only=only, length=14) == list(only)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_depth")
def test_ranks_within_a_period_are_scanned():
    """The pattern repeats, so that every period has the ranks of the first; the partial period has its own."""
    adapter = AdapterConfig(sites=(("mlp/down", (1, 4, 1, 4, 2)),))
    stack = dataclasses.replace(STACK, pattern="AS", num_layers=5, scan=True)
    trained = split_params(shapes_of(attach(ByteLMConfig(stack=stack), adapter)))[1]["stack"]
    found = [trained["periods"][f"block_{i}"]["mlp"]["down"]["adapter"]["u"].shape for i in range(2)]
    assert found == [(2, 1, 8), (2, 4, 8)]
    assert trained["rest"]["block_0"]["mlp"]["down"]["adapter"]["u"].shape == (2, 8)


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_depth")
def test_peft_files_hold_the_rank_of_each_layer(tmp_path):
    config = attach(ByteLMConfig(stack=STACK), DEPTH)
    params = drawn(config.build(), IDS, seed=0)["params"]
    save_peft(tmp_path / "peft", config, params)
    said = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert (said["r"], said["target_modules"]) == (2, ["mixer.out", "mlp.down"])
    assert said["rank_pattern"] == {
        "stack.period_0.block_0.mlp.down": 1,
        "stack.period_1.block_0.mlp.down": 4,
    }
    found = load_peft(tmp_path / "peft", config)
    jax.tree.map(np.testing.assert_array_equal, found, split_params(params)[1])
    other = attach(ByteLMConfig(stack=STACK), dataclasses.replace(DEPTH, sites=("mixer/out", "mlp/down")))
    with pytest.raises(ValueError, match=r"rank_pattern is .* expected {}"):
        load_peft(tmp_path / "peft", other)
    before, after = (
        tree["stack"]["period_1"]["block_0"]["mlp"]["down"] for tree in (params, fuse(config, params)[1])
    )
    update = before["adapter"]["v"] @ before["adapter"]["u"] * DEPTH.alpha / 4
    np.testing.assert_allclose(after["kernel"], before["kernel"] + update, atol=1e-5)


@pytest.mark.parametrize(
    ("stack", "sites", "options", "words"),
    [
        ({"scan": True}, (("mlp/down", (1, 4, 2)),), {}, r"pattern 'S', and these are scanned: .*scan=False"),
        (
            {},
            (("mlp/down", (1, 4)),),
            {},
            r"gives 'mlp/down' 2 ranks, \(1, 4\), and the stack has num_layers = 3",
        ),
        ({}, (("mlp/down", (1, 0, 2)),), {}, "the rank of 'mlp/down' must be at least 1, got 0"),
        ({}, (("mlp/down", (1, 9, 2)),), {}, "rank 9 at site 'mlp/down' of stack 'stack' is more than"),
        ({}, (("mlp/*", 2), ("mlp/down", (2, 4, 2))), {}, r"site 'mlp/down' .* is given ranks \[2, 4\]"),
        ({}, (("mlp/down", (2, 4, 2)),), {"rank": 2, "router": RouterConfig()}, "numbers: set blocks"),
    ],
)
def test_what_is_refused(stack, sites, options, words):
    with pytest.raises(ValueError, match=words) as caught:
        attach(ByteLMConfig(stack=dataclasses.replace(STACK, **stack)), AdapterConfig(sites=sites, **options))
    assert "\n" not in str(caught.value)
