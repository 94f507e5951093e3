"""Runs with low-rank factors of adapters in 8 bits."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    RouterConfig,
    attach,
    distill,
    join_params,
    save_peft,
    split_params,
)
from jaxblt.answers.quantized import products_of
from jaxblt.cli.main import main
from jaxblt.interchange.quantized_run import write_quantized
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.precision.weights import count_bytes, dense_params, find_products, quantize_factors
from jaxblt.testing.tolerances import bound
from jaxblt.training.experimental.online import CanaryGate, OnlineLearner, row_nats
from tests.answers.runs import SHORT, make_run
from tests.mixer_table import table
from tests.parameters import drawn
from tests.training.experimental.online.test_online import MODEL, SETTINGS, rows_of

HEADS = AttentionConfig(dim=32, num_heads=2)
STACK = StackConfig(dim=32, num_layers=2, pattern="A", mlp_dim=32, mixers=table(attention=HEADS))
ADAPTER = AdapterConfig(rank=4, alpha=4.0, router=RouterConfig(chunk=8, reads=(ChunkMean(),), hidden=8))
TEXT = SHORT[:3]
SITE = ("stack", "periods", "block_0", "mixer", "q", "adapter")


@pytest.fixture(scope="module")
def run() -> Any:
    return make_run(attach(ByteLMConfig(stack=STACK), ADAPTER))


@pytest.fixture(scope="module")
def int8(run: Any) -> Any:
    return run.quantize("int8", adapters=True)


def at(params: Any, *path: str) -> Any:
    for name in path:
        params = params[name]
    return params


def test_factors_are_off_by_half_a_scale_and_take_a_fourth_of_the_bytes(run: Any, int8: Any) -> None:
    dense = dense_params(int8.params, products_of(run))
    for name, channels in (("v", (2, 4)), ("u", (2, 2, 16))):
        stored, given, rounded = (at(p, *SITE, name) for p in (int8.params, run.params, dense))
        assert stored.values.dtype == jnp.int8
        assert stored.scale.shape == channels
        scale = np.asarray(stored.scale).reshape((2, *[1] * (given.ndim - len(channels)), *channels[1:]))
        assert (np.abs(given - rounded) <= scale * (0.5 + 1e-4)).all()
        assert count_bytes(stored) == given.size + 4 * np.prod(channels)
    router = jax.tree.leaves(at(int8.params, "stack", "router"))
    assert {leaf.dtype for leaf in router} == {jnp.dtype("float32")}


@pytest.mark.slow(days=28, group="costly", turn="answers/quantized/test_adapters")
def test_scores_are_those_of_the_rounded_factors(run: Any, int8: Any) -> None:
    """The text's nats move by less than a hundredth, though updates are drawn as large as the weights."""
    products = products_of(run)
    alone = run.quantize("int8")
    wide, rounded = (replace(run, params=dense_params(each.params, products)) for each in (alone, int8))
    found, expected, before = (each.score(TEXT).log_likelihood for each in (int8, rounded, wide))
    np.testing.assert_allclose(found, expected, rtol=8 * bound(np.float32, STACK.dim))
    assert 0 < np.abs(np.sum(found) / np.sum(before) - 1) < 1e-2


@pytest.mark.slow(days=28, group="costly", turn="answers/quantized/test_adapters")
def test_the_command_writes_them(run: Any, int8: Any, tmp_path: Any) -> None:
    write_quantized(run, tmp_path / "run")
    out = tmp_path / "int8"
    main(["quantize", str(tmp_path / "run"), "--scheme", "int8", "--adapters", "--out", str(out)])
    loaded = jaxblt.load(out)
    np.testing.assert_array_equal(at(loaded.params, *SITE, "v").values, at(int8.params, *SITE, "v").values)
    np.testing.assert_array_equal(loaded.score(TEXT).log_likelihood, int8.score(TEXT).log_likelihood)


def test_what_needs_whole_factors_says_so(run: Any, int8: Any, tmp_path: Any) -> None:
    model, code = run.recipe.model, jnp.ones(4)
    for use in (
        lambda: save_peft(tmp_path / "peft", model, int8.params, code=code),
        lambda: distill(model, int8.params, code),
    ):
        with pytest.raises(ValueError, match="needs weights that are not quantised"):
            use()
    bare = replace(run.recipe, model=ByteLMConfig(stack=STACK))
    with pytest.raises(ValueError, match="none of the quantised products has a low-rank update"):
        replace(run, recipe=bare, params=split_params(run.params)[0]).quantize("int8", adapters=True)


@pytest.mark.slow(days=28, group="costly", turn="answers/quantized/test_adapters")
def test_a_trained_adapter_loses_little() -> None:
    """A hundredth of the nats that training took away, of an adapter that learned a cycle of bytes."""
    module, ids = MODEL.build(), jnp.zeros((1, 24), jnp.int32)
    products = find_products(jnp.float32, lambda: jax.eval_shape(module.init, jax.random.key(0), ids))[0]
    base, trained = split_params(drawn(module, ids)["params"], ("embedding",))
    loss, rows = row_nats(MODEL, base), rows_of(0, 0)
    gate = CanaryGate(loss, rows_of(0, 99), tolerance=0.0)
    learner = OnlineLearner(SETTINGS, loss, trained, gate)
    verdict = learner.update(rows)
    whole = join_params(base, learner.params)
    rounded = split_params(dense_params(quantize_factors(whole, products), products), ("embedding",))[1]
    lost = gate.judge(learner.params, rounded).after - verdict.after
    assert 0 < abs(lost) < 0.01 * (verdict.before - verdict.after)
