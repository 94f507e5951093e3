"""Tables of shardings in short."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh, sharding_table
from jaxblt.parallel.folded import layer_of, short_table


@pytest.fixture(scope="module")
def boxed():
    model = ByteLMConfig(
        stack=StackConfig(dim=32, num_layers=5, pattern=("recurrence", "A", "recurrence"))
    ).build()
    return jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"])


def test_a_long_table_has_a_line_for_each_kind_of_layer(boxed):
    mesh = make_mesh(fsdp=2)
    lines = short_table(boxed, mesh).splitlines()
    leaves = jax.tree.leaves(nn.meta.unbox(boxed))
    assert len(lines) <= 10 < 15 < len(leaves)
    rows = {line.split("  ")[0]: line.split() for line in lines[1:]}
    kinds = {name for name in rows if "block_" in name}
    assert any(name.endswith("alike") for name in kinds)
    assert f"{sum(leaf.size for leaf in leaves):,}" in lines[-1]
    full = sharding_table(boxed, mesh).splitlines()[-1].split()[-1]
    assert f" {full} " in lines[-1]
    assert "fsdp" in lines[1]


def test_a_short_table_and_names_without_layers_stay_as_they_are(boxed):
    mesh = make_mesh()
    few = {"embedding": boxed["embedding"]}
    assert short_table(few, mesh) == sharding_table(few, mesh)
    assert layer_of("latent/period_1/block_0/mlp/up/kernel") == ("latent/period_1/block_0", "mlp/up/kernel")
    assert layer_of("down/key/kernel") == ("down", "key/kernel")
