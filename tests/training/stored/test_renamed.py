"""Checkpoints from before parameters were renamed."""

import json
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.mixers import AttentionConfig, ExplicitFilter, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.state import content_hash, freeze, start
from jaxblt.training.stored.checkpoint import Checkpointer, restore
from jaxblt.training.stored.fitting import fitting_shapes
from jaxblt.training.stored.frozen_store import read_frozen, write_frozen
from jaxblt.training.stored.integrity import StateMismatch
from jaxblt.training.stored.renamed import current_name
from jaxblt.training.stored.serialize import from_json, to_json
from tests.parameters import abstract_like

OLD = {
    "periods": {"block_0": {"mixer": {"in": jnp.arange(6.0), "out": -jnp.arange(4.0), "short": jnp.ones(2)}}},
    "head": {"kernel": 2 * jnp.ones((2, 3)), "norm": {"scale": jnp.ones(2)}},
}
NEW = {
    "periods": {
        "block_0": {
            "mixer": {
                "in": {"kernel": jnp.arange(6.0)},
                "out": {"kernel": -jnp.arange(4.0)},
                "short": jnp.ones(2),
            }
        }
    },
    "head": {"logits": {"kernel": 2 * jnp.ones((2, 3))}, "norm": {"scale": jnp.ones(2)}},
}


def test_names_of_today_stay():
    for name in ("block_0/mixer/in/kernel", "block_0/mixer/q/kernel", "head/logits/kernel", "mlp/up/kernel"):
        assert current_name(name) == name


def test_parameters_and_optimiser_are_read_under_their_old_names(tmp_path):
    optimizer = optax.adam(1e-3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, start(OLD, optimizer), {"seconds": 1.0})
    wanted = start(NEW, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.restore(abstract_like(wanted))
    jax.tree.map(np.testing.assert_array_equal, found.state, wanted)
    params = restore(tmp_path, abstract_like(NEW), subtree="params").state
    jax.tree.map(np.testing.assert_array_equal, params, NEW)


def test_what_was_added_since_is_zeros(tmp_path):
    """A mixture of boundary scores had no separation once, which is as if all were 0."""
    optimizer, old = optax.adam(1e-3), {"router": {"theta": jnp.ones(1), "center": jnp.arange(2.0)}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, start(old, optimizer), {"seconds": 1.0})
    wanted = start({"router": old["router"] | {"separation": jnp.zeros(2)}}, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        found = checkpoints.restore(abstract_like(wanted))
    jax.tree.map(np.testing.assert_array_equal, found.state, wanted)
    asked = abstract_like({"router": old["router"] | {"bias": jnp.zeros(2)}})
    with pytest.raises(StateMismatch, match="bias"):
        restore(tmp_path, asked, subtree="params")


@pytest.mark.parametrize("error", [StateMismatch, ValueError])
def test_a_model_that_does_not_fit_the_old_names_is_asked_about_todays(tmp_path, error):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, OLD)
    asked = []

    def fit(stored):
        asked.append(sorted(stored["head"]))
        if "logits" not in stored["head"]:
            raise error("the model has no such head")
        return abstract_like(NEW)

    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, fit).state, NEW)
    assert asked == [["kernel", "norm"], ["logits", "norm"]]


@pytest.mark.slow(days=28, group="costly")
def test_a_hyena_stored_under_old_names_fits_its_model(tmp_path):
    """An array stands where the model of today has a module."""
    ids = jnp.full((1, 8), 70, jnp.int32)
    model = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern="H"), tie_head=False).build()
    init = lambda: model.init(jax.random.key(0), ids)["params"]  # noqa: E731
    params = nn.meta.unbox(jax.jit(init)())
    block = params["stack"]["periods"]["block_0"]
    mixer = {**block["mixer"], **{name: block["mixer"][name]["kernel"] for name in ("in", "out")}}
    stack = {**params["stack"], "periods": {"block_0": {**block, "mixer": mixer}}}
    head = {"norm": params["head"]["norm"], "kernel": params["head"]["logits"]["kernel"]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {**params, "stack": stack, "head": head})
    apply = lambda params: model.apply({"params": params}, ids)  # noqa: E731
    found = restore(tmp_path, partial(fitting_shapes, init, apply)).state
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_a_frozen_tree_is_known_by_the_names_that_it_was_stored_under(tmp_path):
    tree = freeze(OLD)
    write_frozen(tmp_path, {"entropy": tree})
    found = read_frozen(tmp_path, "entropy", tree.content_hash, abstract_like(NEW))
    assert found.content_hash == tree.content_hash != content_hash(NEW)
    jax.tree.map(np.testing.assert_array_equal, found.params, NEW)


def test_what_an_old_checkpoint_lacks_is_named(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": OLD})
    with pytest.raises(StateMismatch, match="extra: asked for, not stored"):
        restore(tmp_path, abstract_like(NEW | {"extra": jnp.ones(1)}), subtree="params")


def test_a_stack_stored_with_a_config_for_each_family_is_read():
    old = {
        "class": "jaxblt.models.stack:StackConfig",
        "dim": 32,
        "pattern": "HWM",
        "window": 64,
        "hyena": {"class": "jaxblt.mixers.hyena.hyena:HyenaConfig", "dim": 32, "order": 3},
        "attention": {
            "class": "jaxblt.mixers.attention.attention:AttentionConfig",
            "dim": 32,
            "num_heads": 2,
        },
        "recurrence": {"class": "jaxblt.mixers.linear.recurrence:GatedRecurrenceConfig", "dim": 64},
        "extra": [],
    }
    found = from_json(json.dumps(old))
    hyena = HyenaConfig(dim=32, order=3)
    assert found.mixers == {
        "H": hyena,
        "W": AttentionConfig(dim=32, num_heads=2, window=64),
        "M": replace(hyena, filter=ExplicitFilter(taps=128)),
    }
    assert from_json(to_json(found)) == found
    assert '"class": "hyena"' in to_json(found)


@pytest.mark.parametrize(("filter", "expected"), [("implicit", "mosaic_gpu_vjp"), ("modal", "mosaic_gpu")])
def test_a_hyena_stored_with_a_kernel_that_went_takes_the_one_that_stayed(filter, expected):
    config = HyenaConfig(dim=32, filter={"implicit": ImplicitFilter(600), "modal": ModalFilter()}[filter])
    stored = json.loads(to_json(config)) | {"implementation": "mosaic_gpu"}
    assert from_json(json.dumps(stored)).implementation == expected
