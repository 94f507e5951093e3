"""What a run takes from another: all but what is new, part of it frozen, lower layers at lower rates."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.training.optimisers.adamw import AdamWConfig, make_optimizer
from jaxblt.training.optimisers.patterns import depth_scales, matching, without

HEADS = AttentionConfig(dim=8, num_heads=1)


def stack(layers, pattern, **fields):
    return StackConfig(
        dim=8,
        num_layers=layers,
        pattern=pattern,
        mlp_dim=8,
        mixers=dict.fromkeys(set(pattern), HEADS),
        **fields,
    )


def boxed_of(config, **options):
    module = config.build(**options)
    ids = jnp.zeros((1, 16), jnp.int32)
    return module, jax.eval_shape(module.init, jax.random.key(0), ids)["params"]


@pytest.mark.parametrize("scan", [True, False])
def test_rates_fall_from_the_head_down(scan):
    module, boxed = boxed_of(ByteLMConfig(stack=stack(5, "AB", scan=scan), tie_head=False))
    scales = {"/".join(path): x for path, x in flatten_dict(depth_scales(boxed, module.stacks, 0.5)).items()}
    assert scales["head/logits/kernel"] == scales["head/norm/scale"] == 1
    assert scales["embedding/bytes"] == 0.5**6
    assert scales["stack/rest/block_0/mlp/up/kernel"] == 0.5
    if scan:
        up = scales["stack/periods/block_1/mlp/up/kernel"]
        assert up.shape == (2, 1, 1)
        np.testing.assert_array_equal(up.ravel(), [0.5**4, 0.5**2])
        assert scales["stack/periods/block_0/mixer_norm/scale"].shape == (2, 1)
    else:
        assert scales["stack/period_0/block_1/mlp/up/kernel"] == 0.5**4
        assert scales["stack/period_1/block_0/mlp/up/kernel"] == 0.5**3


def test_blocks_of_all_stacks_count():
    config = BLTConfig(stack(1, "A"), stack(3, "A"), stack(2, "A"), hash=None, bridge_heads=1)
    shapes = {
        "latent": {"rest": {"block_0": {"x": jnp.zeros(2)}}, "periods": {"block_0": {"x": jnp.zeros((3, 2))}}}
    }
    scales = depth_scales(shapes, config.build().stacks, 0.1)
    # encoder 1, latent 2..4, decoder 5..6, head 7
    np.testing.assert_allclose(
        scales["latent"]["periods"]["block_0"]["x"].ravel(), [0.1**5, 0.1**4, 0.1**3], rtol=1e-6
    )


def first_update(optimizer, params):
    updates = jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p)[0])(params)
    return flatten_dict(updates, sep="/")


def test_updates_are_scaled_and_a_model_without_stacks_is_refused():
    _, boxed = boxed_of(ByteLMConfig(stack=stack(2, "A")))
    config = {"learning_rate": 1e-2, "warmup_steps": 0, "clip_norm": None}
    params = jax.tree.map(lambda x: jnp.ones(x.shape), nn.meta.unbox(boxed))
    plain = make_optimizer(AdamWConfig(**config), 10, boxed)
    slow = make_optimizer(AdamWConfig(layer_decay=0.5, **config), 10, boxed, {"stack": stack(2, "A")})
    updates = [first_update(o, params) for o in (plain, slow)]
    for name in ("embedding/bytes", "stack/periods/block_0/mlp/up/kernel", "head/norm/scale"):
        ratio = np.asarray(updates[1][name] / updates[0][name])
        expected = {"embedding/bytes": [0.125], "head/norm/scale": [1.0]}.get(name, [0.25, 0.5])
        np.testing.assert_allclose(ratio.reshape(len(expected), -1).T - np.array(expected), 0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"layer_decay = 0\.5 goes by blocks, and the model names no `stacks`"
    ):
        make_optimizer(AdamWConfig(layer_decay=0.5), 200, boxed)


def test_rates_by_pattern():
    """Factors of an update, whatever the optimiser; of two patterns their product."""
    _, boxed = boxed_of(ByteLMConfig(stack=stack(2, "A")))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), nn.meta.unbox(boxed))
    updates = []
    for rates in ((), (("*/mlp/*", 2.0), ("*/up/kernel", 0.25))):
        config = AdamWConfig(learning_rate=1.0, warmup_steps=0, weight_decay=0.0, rates=rates)
        optimizer = make_optimizer(config, 10, boxed)
        updates.append(first_update(optimizer, params))
    mlp = "stack/periods/block_0/mlp"
    for name, factor in ((f"{mlp}/up/kernel", 0.5), (f"{mlp}/down/kernel", 2.0), ("embedding/bytes", 1.0)):
        np.testing.assert_array_equal(updates[1][name], factor * updates[0][name])
    with pytest.raises(
        ValueError, match=r"rates = '\*/ruoter/\*' matches none of .* parameters; the nearest"
    ):
        make_optimizer(AdamWConfig(rates=(("*/ruoter/*", 2.0),)), 200, boxed)


def test_patterns_name_parameters():
    names = ["embedding/bytes", "stack/periods/block_0/mlp/up/kernel", "head/norm/scale"]
    assert matching(("embedding/*", "*/kernel"), names, "freeze") == set(names[:2])
    with pytest.raises(
        ValueError, match=r"freeze = 'embeddings/\*' matches none of 3 parameters; the nearest are embed"
    ):
        matching(("embeddings/*",), names, "freeze")
    tree = {"a": {"b": jnp.ones(1)}, "c": jnp.ones(2)}
    assert set(flatten_dict(without(tree, ("a/*",)), sep="/")) == {"c"}
    with pytest.raises(ValueError, match="matches every parameter, so that none is trained"):
        without(tree, ("*",))
