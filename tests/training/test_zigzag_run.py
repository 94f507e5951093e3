"""Rows of attention alone in zigzag order: a run over a split sequence, and what the order does not go with."""

from dataclasses import replace

import numpy as np
import pytest

import jaxblt
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import MeshConfig
from jaxblt.training.loop import fit
from jaxblt.training.objectives.objectives import Masked
from tests.training.test_extension import blt
from tests.training.test_loop import losses
from tests.training.test_split_run import ADAMW, ONE, SHORT
from tests.training.tiny import Letters, patched_recipe, tiny_recipe


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(
    "data", [{"packing": "first_fit", "long_documents": "split"}, {}], ids=["packed", "full"]
)
def test_attention_alone_takes_rows_in_zigzag_order(data, tmp_path):
    """Trained, validated and scored over eight devices."""
    attention = AttentionConfig(dim=16, num_heads=2, layout="zigzag")
    model = ByteLMConfig(
        stack=StackConfig(dim=16, num_layers=2, pattern="A", mlp_dim=16, mixers={"A": attention}), hash=None
    )
    options = SHORT | {"eval_every": 4, "eval_batches": 2}
    recipe = tiny_recipe(model=model, optimizer=ADAMW, data=data, **options)
    recipe = replace(recipe, data=replace(recipe.data, seq_len=64))
    one = fit(recipe, tmp_path / "one", source=Letters(), devices=ONE)
    split = fit(replace(recipe, mesh=MeshConfig(data=2, seq=4)), tmp_path / "split", source=Letters())
    found, expected = (list(losses(tmp_path / name).values()) for name in ("split", "one"))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert split.validation["loss"] == pytest.approx(one.validation["loss"], rel=1e-5)
    scored = jaxblt.load(tmp_path / "split").evaluate(
        "validation", source=Letters(), max_batches=2, mesh=MeshConfig(data=2, seq=4)
    )
    assert scored["loss"] == pytest.approx(one.validation["loss"], rel=1e-5)


def test_what_zigzag_order_does_not_go_with_is_named():
    zigzag = AttentionConfig(dim=16, num_heads=2, layout="zigzag")
    with pytest.raises(ValueError, match=r"zigzag layout is for rings.*window=4"):
        replace(zigzag, window=4)
    with pytest.raises(
        ValueError, match=r"layout='zigzag' goes with a pattern of it alone.*got pattern 'AH'"
    ):
        StackConfig(dim=16, pattern="AH", mixers={"A": zigzag})
    alone = StackConfig(dim=16, pattern="X", mixers={"X": zigzag})
    with pytest.raises(ValueError, match=r"n-grams need bytes in order.*hash=None"):
        ByteLMConfig(stack=alone, hash=HashConfig())
    with pytest.raises(ValueError, match="patches are made of bytes in order"):
        replace(blt(), latent=replace(alone, dim=blt().latent.dim))
    with pytest.raises(ValueError, match=r"objective Masked needs bytes in order.*'zigzag'"):
        tiny_recipe(model=ByteLMConfig(stack=replace(alone, causal=False)), objective=Masked(rate=0.3))
    with pytest.raises(ValueError, match="an entropy model needs bytes in order"):
        replace(patched_recipe("some/run"), entropy_model=ByteLMConfig(stack=alone))
