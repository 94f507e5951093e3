"""A train step in FP8 with delayed scales: what it remembers, a spike, and a run that goes on."""

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig
from jaxblt.precision import (
    Fp8Config,
    LossScaleConfig,
    find_sites,
    first_amax,
    first_loss_scale,
    next_amax,
    next_loss_scale,
)
from jaxblt.precision.device import check_fp8
from jaxblt.precision.scaling import check_scales
from jaxblt.training.state import ENTROPY, Frozen, TrainState, start, without_frozen
from jaxblt.training.step import Task, make_train_step
from jaxblt.training.stored.checkpoint import Checkpointer
from jaxblt.training.train_config import TrainConfig
from pallas_kernels.runtime import Device
from tests.parameters import abstract_like, drawn
from tests.training.tiny import TinyConfig, random_batch

CONFIG = Fp8Config(scaling="delayed", history=3)
MODEL = ByteLMConfig(stack=StackConfig(dim=16, num_layers=2, pattern=("attention",), mlp_dim=32))


def test_a_history_shifts_and_backs_off_where_an_entry_is_not_finite():
    amax = {"a": jnp.asarray([[4.0, 2.0, 1.0], [0.0, 0.0, 0.0]], jnp.float32)}
    seen = {"a": jnp.asarray([[3.0, 0.0, 0.0], [jnp.nan, 0.0, 0.0]], jnp.float32)}
    after = next_amax(amax, seen)
    np.testing.assert_array_equal(after["a"], [[3, 4, 2], [2, 0, 0]])
    after = next_amax(after, {"a": seen["a"].at[0, 0].set(jnp.inf)})
    np.testing.assert_array_equal(after["a"], [[8, 3, 4], [4, 2, 0]])


def test_an_entropy_model_remembers_nothing_and_stays_out_of_fp8():
    """Its parameters are not the model's, so no scales are kept for it; evaluations cut by its bf16 entropies too."""
    ends, ids = replace(MODEL.stack, num_layers=1, scan=False), jnp.zeros((2, 32), jnp.int32)
    patcher = PatcherConfig(mode="entropy", threshold=1.0, block_size=16, capacity=16)
    module = BLTConfig(ends, ends, ends, hash=None, bridge_heads=1).build(dtype=jnp.bfloat16, patcher=patcher)
    entropy, still = MODEL.build(dtype=jnp.bfloat16), optax.sgd(0.0)

    def shapes(model, **given):
        return jax.eval_shape(lambda: model.init(jax.random.key(0), ids, **given)["params"])

    sites, boxed = find_sites(CONFIG, lambda: shapes(module, entropies=jnp.zeros((2, 32))))
    frozen = {ENTROPY: Frozen(nn.meta.unbox(shapes(entropy)), "drawn")}
    scaling = {"amax": jax.eval_shape(lambda: first_amax(CONFIG, sites, boxed))}
    state = jax.eval_shape(
        lambda p, f, s: start(p, still, f, scaling=s), nn.meta.unbox(boxed), frozen, scaling
    )
    step = make_train_step(Task(module, entropy_model=entropy, fp8=CONFIG), still)
    after, _ = jax.eval_shape(step, state, random_batch(0, rows=2))
    assert jax.tree.structure(after.scaling) == jax.tree.structure(scaling)


@pytest.mark.slow(days=28, group="costly")
def test_a_spike_saturates_once_is_forgotten_and_a_checkpoint_goes_on_bit_for_bit(tmp_path):
    """The scale of the step with the spike is of the past, those of three steps after it leave room for it."""
    module, ids = MODEL.build(dtype=jnp.bfloat16), jnp.zeros((1, 32), jnp.int32)
    init = lambda: module.init(jax.random.key(0), ids)["params"]  # noqa: E731
    sites, boxed = find_sites(CONFIG, lambda: jax.eval_shape(init))
    assert {path[-1] for path in sites} == {"q", "k", "v", "out", "gate", "up", "down"}
    sgd = optax.sgd(0.0)
    state = start(drawn(module, ids)["params"], sgd, scaling={"amax": first_amax(CONFIG, sites, boxed)})
    step, batch = make_train_step(Task(module, fp8=CONFIG), sgd), random_batch(0)

    def block(tree):
        return tree["stack"]["periods"]["block_0"]

    seen, losses, later = [], [], None
    for turn in range(7):
        if turn in (2, 3):  # the norm before the MLP is a hundred times as large for one step
            scale = block(state.params)["mlp_norm"]["scale"]
            block(state.params)["mlp_norm"]["scale"] = scale * jnp.float32(100 if turn == 2 else 0.01)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        seen.append(np.asarray(block(state.scaling["amax"])["mlp"]["gate"]["amax"][0, 0]))
        if turn == 4:
            with Checkpointer(tmp_path) as checkpoints:
                checkpoints.save(5, without_frozen(state))
                later = checkpoints.restore(abstract_like(without_frozen(state))).state
    assert seen[0].shape == (3,)
    assert seen[2][0] == pytest.approx(100 * seen[1][0], rel=0.01)
    # 448 at the scale of the past is at most twice the past's largest entry
    assert 2 * seen[1].max() < seen[2][0] == seen[3].max() == seen[4].max()
    assert seen[5].max() == seen[1].max()
    assert metrics["skipped"] == 0
    assert losses[6] == losses[1]
    # what up reads is observed by gate alone, which reads it first
    assert not np.any(block(state.scaling["amax"])["mlp"]["up"]["amax"][0, 0])
    again = TrainState(**later)
    for _ in range(2):
        again, _ = step(again, batch)
    jax.tree.map(np.testing.assert_array_equal, without_frozen(again), without_frozen(state))


@pytest.mark.slow(days=28, group="costly")
def test_weights_learn_through_fp8_with_micro_batches_as_without():
    """Gradients are within FP8's rounding of bf16's, and both ways to cut a batch observe the same entries."""
    module, ids = (
        replace(MODEL, stack=replace(MODEL.stack, num_layers=1, scan=False)),
        jnp.zeros((1, 32), jnp.int32),
    )
    module = module.build(dtype=jnp.bfloat16)
    init = lambda: module.init(jax.random.key(0), ids)["params"]  # noqa: E731
    sites, boxed = find_sites(CONFIG, lambda: jax.eval_shape(init))
    params, sgd, after = drawn(module, ids)["params"], optax.sgd(1.0), {}
    for name, fp8, accumulate in (("bf16", None, 1), ("fp8", CONFIG, 1), ("micro", CONFIG, 2)):
        scaling = None if fp8 is None else {"amax": first_amax(CONFIG, sites, boxed)}
        state = start(jax.tree.map(jnp.array, params), sgd, scaling=scaling)
        after[name], _ = make_train_step(Task(module, fp8=fp8), sgd, accumulate=accumulate)(
            state, random_batch(0)
        )
    moved = {
        name: [
            np.asarray(a - b).ravel()
            for a, b in zip(*map(jax.tree.leaves, (state.params, params)), strict=True)
        ]
        for name, state in after.items()
    }
    for a, b, c in zip(*moved.values(), strict=True):
        assert np.linalg.norm(b - a) < 0.2 * np.linalg.norm(a)
        assert np.linalg.norm(c - b) < 0.2 * np.linalg.norm(b)
    largest = [jax.tree.leaves(after[name].scaling) for name in ("fp8", "micro")]
    for a, b in zip(*largest, strict=True):
        np.testing.assert_allclose(a[:2], b[:2], rtol=2.0**-6)


def test_the_loss_scale_halves_where_gradients_overflow_and_grows_again():
    """Overflows are skipped and counted, and end no run while the scale is above 1."""
    module, config = TinyConfig().build(dtype=jnp.float16), LossScaleConfig(first=2.0**24, every=3)
    sgd = optax.sgd(0.1)
    state = start(
        drawn(module, jnp.zeros((1, 32), jnp.int32))["params"],
        sgd,
        scaling={"loss": first_loss_scale(config)},
    )
    step, batch, scales = (
        make_train_step(Task(module, loss_scale=config), sgd, max_skips=1),
        random_batch(0),
        [],
    )
    for _ in range(20):
        state, metrics = step(state, batch)
        scales.append(float(metrics["loss_scale"]))
        assert metrics["skipped_in_a_row"] == 0
    skipped = int(metrics["skipped"])
    assert 2 <= skipped < 15
    first = scales[: scales.index(min(scales)) + 1]
    assert first == [2.0 ** (24 - i) for i in range(len(first))]
    assert scales[len(first) + 2] == 2 * min(scales)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(state.params))


def test_a_loss_scale_by_hand():
    state = {"scale": jnp.float32(2), "good": jnp.int32(0)}
    told = []
    for good in (True, True, False, False, False, True, True):
        state = next_loss_scale(state, jnp.asarray(good), 2)
        told.append((float(state["scale"]), int(state["good"])))
    assert told == [(2, 1), (4, 0), (2, 0), (1, 0), (1, 0), (1, 1), (2, 0)]


def test_bad_precisions_are_named_in_one_line():
    ampere = Device("gpu", (8, 0), "NVIDIA A100")
    with pytest.raises(
        ValueError, match=r"'fp8' needs CUDA capability 8.9, and NVIDIA A100 has 8.0: use train.p"
    ):
        check_fp8(ampere)
    for device in (Device("cpu"), Device("gpu", (9, 0), "H200"), Device("gpu", (8, 9), "L4")):
        check_fp8(device)
    with pytest.raises(ValueError, match=r"scaling\['loss'\]\['scale'\] of the checkpoint holds inf"):
        check_scales({"loss": {"scale": np.float32(np.inf), "good": np.int32(1)}})
    with pytest.raises(
        ValueError, match=r"amax'\] of the checkpoint holds -1.0, and a scale is made of finite numb"
    ):
        check_scales({"amax": np.array([0.0, -1.0], np.float32)})
    check_scales(None)
    with pytest.raises(ValueError, match="set dtype='bfloat16', or precision='dtype'"):
        TrainConfig(dtype="float32", precision="fp8")
    with pytest.raises(ValueError, match="finds no product to run in FP8 among 0"):
        find_sites(CONFIG, lambda: None)
    model = MODEL.build(dtype=jnp.bfloat16)
    trace = lambda: jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))  # noqa: E731
    with pytest.raises(
        ValueError, match=r"train.fp8.keep = '\*/none' matches none of the model's 7 products"
    ):
        find_sites(replace(CONFIG, keep=("*/none",)), trace)
    kept, _ = find_sites(replace(CONFIG, keep=("*/mixer/*",)), trace)
    assert {path[-1] for path in kept} == {"gate", "up", "down"}
