import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special

from jaxblt.patching import PatcherConfig, bytes_per_patch, entropies_from_logits, make_patches
from jaxblt.training.evaluate import make_eval_step
from jaxblt.training.objectives.objectives import Masked, NextByte, OrderAgnostic, Span
from jaxblt.training.optimisers.adamw import AdamWConfig, Bounded, make_optimizer, make_schedule
from jaxblt.training.state import (
    BASE,
    ENTROPY,
    content_hash,
    freeze,
    freeze_entropy,
    start,
    whole_params,
    widen,
)
from jaxblt.training.step import Task, find_entropies, make_train_step, predict, split_rows
from tests.tolerances import tol
from tests.training.tiny import TinyConfig, random_batch

ADAMW = AdamWConfig(learning_rate=1e-2, warmup_steps=0, floor=1.0, clip_norm=1.0)


@functools.cache
def init(dim: int):
    return jax.jit(TinyConfig(dim=dim).build().init)(jax.random.key(0), jnp.zeros((1, 32), jnp.int32))[
        "params"
    ]


def build(config: TinyConfig, *, optimizer: AdamWConfig = ADAMW, dtype=jnp.float32, patcher=None, **options):
    boxed = init(config.dim)
    return (
        Task(config.build(dtype=dtype, patcher=patcher), **options),
        make_optimizer(optimizer, 100, boxed),
        nn.meta.unbox(boxed),
    )


@functools.cache
def plain():
    """A step of the smallest model that tests share: its first state, and the step with its schedule and limit."""
    task, adamw, params = build(TinyConfig())
    step = make_train_step(task, adamw, schedule=make_schedule(ADAMW, 100), max_skips=2)
    return task, params, step, lambda: start(copy(params), adamw)


def copy(tree):
    # Copy on the host: jnp.array compiles a program for each shape
    return jax.tree.map(lambda x: jax.device_put(np.array(x)), tree)


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def test_loss_is_mean_cross_entropy_of_scored_bytes():
    task, params, step, begin = plain()
    batch = poison(random_batch(0), False)
    _, metrics = step(begin(), batch)
    apply = jax.jit(task.model.apply)
    logits, _ = apply({"params": params}, batch.inputs, segment_ids=batch.segment_ids)
    log_p = scipy.special.log_softmax(np.asarray(logits), -1)
    picked = np.take_along_axis(log_p, np.asarray(batch.targets)[..., None], -1)[..., 0]
    scored = np.asarray(batch.loss_mask) == 1
    expected = -picked[scored].mean()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["bits_per_byte"], expected / math.log(2), rtol=1e-5)
    assert float(metrics["scored_bytes"]) == scored.sum()
    norm = math.sqrt(sum(np.square(leaf).sum() for leaf in map(np.asarray, jax.tree.leaves(params))))
    np.testing.assert_allclose(metrics["param_norm"], norm, rtol=1e-6)


def test_norm_of_parameters_is_taken_before_the_update():
    """XLA would copy parameters that are read when others are updated already."""
    _, _, step, begin = plain()
    state = begin()
    (call,) = jax.make_jaxpr(step)(state, random_batch(0)).eqns
    leaves = len(jax.tree.leaves(state.params))
    barriers = [eqn for eqn in call.params["jaxpr"].eqns if eqn.primitive.name == "optimization_barrier"]
    (held,) = [eqn for eqn in barriers if len(eqn.invars) > leaves]
    scalars = sorted(str(v.aval.dtype) for v in held.invars[leaves:] if not v.aval.shape)
    assert scalars == ["bool", "float32"]


@pytest.mark.slow(days=14)
@pytest.mark.parametrize("objective", [NextByte(), OrderAgnostic()], ids=["next", "any_order"])
def test_micro_batches_equal_the_whole_batch(objective):
    """Also when rows differ in scored bytes, so that a mean of means would be wrong."""
    config = TinyConfig(causal=objective.causal, side=True)
    task, adamw, params = build(config, objective=objective)
    batch = random_batch(0, rows=8)
    batch = batch.replace(loss_mask=batch.loss_mask.at[1::3].set(0))
    results = [
        make_train_step(task, adamw, accumulate=n, seed=3)(start(copy(params), adamw), batch) for n in (1, 4)
    ]
    (whole, expected), (parts, found) = results
    assert set(expected) == set(found)
    assert_trees_close(found, expected, rtol=2e-5)
    # Adam's first step is lr * sign(g): compare what the optimiser averaged instead
    moments = [state.opt_state[1][0].mu for state in (whole, parts)]
    assert_trees_close(moments[1], moments[0], **tol(jnp.float32, n=8 * 32))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="4 rows does not divide into 3 micro-batches"):
        split_rows(random_batch(0), 3)


def test_micro_batches_hold_every_row_once():
    batch = random_batch(0, rows=6)
    parts = split_rows(batch, 3)
    assert parts.inputs.shape == (3, 2, 32)
    rows = {tuple(row) for row in np.asarray(parts.inputs).reshape(6, 32).tolist()}
    assert rows == {tuple(row) for row in np.asarray(batch.inputs).tolist()}


def test_sown_losses_are_added_and_sown_metrics_reported():
    _, _, step, begin = plain()
    batch = poison(random_batch(0), False)
    task, adamw, params = build(TinyConfig(side=True))
    _, metrics = make_train_step(task, adamw)(begin(), batch)
    _, silent = step(begin(), batch)
    assert float(metrics["sown_loss"]) > 0
    assert float(silent["sown_loss"]) == 0
    assert 0 < float(metrics["active"]) < 1
    assert float(metrics["loss"]) == float(silent["loss"])

    def total(params):
        (logits, _), side = task.model.apply(
            {"params": params}, batch.inputs, segment_ids=batch.segment_ids, mutable=["losses", "metrics"]
        )
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], -1)[..., 0]
        mask = batch.loss_mask.astype(jnp.float32)
        share = jnp.exp(jnp.sum(jax.lax.stop_gradient(picked) * mask, 1) / jnp.sum(mask, 1))
        sown = side["losses"]["size"][0] + jnp.mean(share * side["losses"]["price"][0].rows)
        return -jnp.sum(picked * mask) / jnp.sum(mask) + sown

    norm = jax.jit(lambda params: optax.tree.norm(jax.grad(total)(params)))
    np.testing.assert_allclose(metrics["grad_norm"], norm(params), rtol=1e-5)
    assert float(metrics["grad_norm"]) != float(silent["grad_norm"])


def poison(batch, active):
    """A batch whose loss weights, of fp32, are infinite when `active`."""
    mask = np.asarray(batch.loss_mask, np.float32)
    return batch.replace(loss_mask=np.where(mask > 0, np.float32(np.inf), mask) if active else mask)


def test_a_step_that_is_not_finite_changes_nothing_but_counters():
    _, _, step, begin = plain()
    good, bad = poison(random_batch(0), False), poison(random_batch(0), True)
    state, _ = step(begin(), good)
    before = copy(state)
    state, metrics = step(state, bad)
    assert not np.isfinite(float(metrics["loss"]))
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 1)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    assert float(metrics["update_norm"]) == 0
    state, metrics = step(state, good)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (3, 1, 0)
    assert float(metrics["update_norm"]) > 0


@pytest.mark.slow(days=28, group="costly", turn="training/test_step", every="False")
@pytest.mark.parametrize("bounded", [False, True])
def test_an_update_that_is_not_finite_changes_nothing_either(bounded):
    """Loss and gradient are fine: the learning rate becomes NaN after the first step."""
    task, _, params = build(TinyConfig())
    rate = lambda count: jnp.where(count == 0, jnp.float32(1e-3), jnp.float32(jnp.nan))  # noqa: E731
    sgd = (Bounded if bounded else optax.GradientTransformation)(*optax.sgd(rate))
    step, state = make_train_step(task, sgd, schedule=rate), start(copy(params), sgd)
    state, _ = step(state, random_batch(0))
    before = copy(state)
    state, metrics = step(state, random_batch(0))
    assert np.isfinite(float(metrics["loss"]))
    assert np.isfinite(float(metrics["grad_norm"]))
    assert (int(before.skipped), int(state.skipped), int(state.skipped_in_a_row)) == (0, 1, 1)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    assert float(metrics["update_norm"]) == 0


def test_too_many_skips_in_a_row_stay_visible():
    _, params, step, begin = plain()
    good, bad = poison(random_batch(0), False), poison(random_batch(0), True)
    state = begin()
    for batch in (bad, bad, good, good):
        state, metrics = step(state, batch)
    assert float(metrics["skipped_in_a_row"]) == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_a_batch_without_scored_bytes_changes_nothing_and_is_counted():
    """A loss of 0 would look good, and weight decay would pull at the parameters all the same."""
    _, params, step, begin = plain()
    batch = poison(random_batch(0), False)
    state, metrics = step(begin(), batch.replace(loss_mask=batch.loss_mask * 0))
    assert math.isnan(float(metrics["loss"]))
    assert float(metrics["scored_bytes"]) == 0
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (1, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


@pytest.mark.slow(days=28, group="costly", turn="training/test_step")
def test_randomness_is_a_function_of_seed_and_step():
    task, adamw, params = build(TinyConfig(dropout=0.5))
    batch = random_batch(0)

    steps = {seed: make_train_step(task, adamw, seed=seed) for seed in (0, 1)}

    def loss(seed, at):
        state = start(copy(params), adamw).replace(step=jnp.int32(at))
        return float(steps[seed](state, batch)[1]["loss"])

    assert loss(0, 3) == loss(0, 3)
    assert len({loss(0, 3), loss(0, 4), loss(1, 3)}) == 3


@pytest.mark.slow(days=28, group="costly", turn="training/test_step")
def test_bfloat16_computes_over_fp32_parameters():
    _, _, step, begin = plain()
    task, adamw, _ = build(TinyConfig(), dtype=jnp.bfloat16)
    batch = poison(random_batch(0), False)
    losses = []
    for run in (step, make_train_step(task, adamw)):
        state, metrics = run(begin(), batch)
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        assert metrics["loss"].dtype == jnp.float32
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[1], losses[0], **tol(jnp.bfloat16))


@pytest.mark.slow(days=28, group="costly", turn="training/test_step")
def test_full_rows_may_go_without_segment_ids():
    _, _, step, begin = plain()
    task, adamw, _ = build(TinyConfig(), packed=False)
    batch = poison(random_batch(0), False)
    ones = np.ones(batch.inputs.shape, np.int32)
    full = batch.replace(segment_ids=ones, loss_mask=ones.astype(np.float32))
    losses = [float(run(begin(), full)[1]["loss"]) for run in (step, make_train_step(task, adamw))]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(
    "objective", [NextByte(), Masked(rate=0.3), Span(), OrderAgnostic()], ids=lambda o: type(o).__name__
)
def test_one_batch_is_overfitted(objective):
    """With the objective's choice held fixed, the loss goes to (nearly) zero."""
    batch = random_batch(5, rows=2, length=16, letters=bytes(range(97, 123)))
    fixed = objective(jax.random.key(1), batch)
    step, state = overfitter(objective.causal)
    state = copy(state)
    first = None
    for _ in range(300):
        state, metrics = step(state, fixed)
        first = metrics if first is None else first
    assert float(first["loss"]) > 4
    assert float(metrics["loss"]) < 0.1


@functools.cache
def overfitter(causal: bool):
    optimizer = AdamWConfig(learning_rate=1e-2, warmup_steps=10, floor=0.1, weight_decay=0.0, decay_steps=300)
    task, adamw, params = build(TinyConfig(dim=64, causal=causal), optimizer=optimizer)
    return make_train_step(task, adamw), start(params, adamw)


@pytest.mark.slow(days=28, group="costly")
def test_frozen_entropies_cut_the_patches():
    entropy_model, entropy_params = TinyConfig(dim=8).build(), nn.meta.unbox(init(8))
    batch = random_batch(0)
    frozen = freeze_entropy(entropy_params)
    rounded = frozen[ENTROPY].params
    apply = jax.jit(entropy_model.apply)
    logits, _ = apply({"params": widen(rounded)}, batch.inputs, segment_ids=batch.segment_ids)
    entropies = jax.jit(entropies_from_logits)(logits)
    threshold = float(np.median(entropies))
    patcher = PatcherConfig(mode="entropy", threshold=threshold, block_size=8)
    task, adamw, params = build(TinyConfig(), patcher=patcher, entropy_model=entropy_model)
    state, metrics = make_train_step(task, adamw)(start(copy(params), adamw, copy(frozen)), batch)
    cut = jax.jit(functools.partial(make_patches, patcher))
    expected = cut(batch.inputs, segment_ids=batch.segment_ids, entropies=entropies)
    np.testing.assert_allclose(metrics["bytes_per_patch"], bytes_per_patch(expected), rtol=1e-6)
    assert 1 < float(metrics["bytes_per_patch"]) < 8
    assert float(metrics["patches"]) == int((expected.lengths > 0).sum())
    jax.tree.map(np.testing.assert_array_equal, state.frozen, frozen)
    # entropies in the batch take precedence, and give the same patches when they are the same
    given = dataclasses.replace(task, entropy_model=None), params, {}, batch.replace(entropies=entropies)
    for which, *arguments in ((task, params, frozen, batch), given):
        _, patches, _ = jax.jit(functools.partial(predict, which, rngs={}))(*arguments)
        np.testing.assert_array_equal(patches.patch_ids, expected.patch_ids)


def test_entropy_patching_without_entropies_says_what_to_do():
    task, _, _ = build(TinyConfig(), patcher=PatcherConfig(mode="entropy", threshold=1.0, block_size=8))
    with pytest.raises(ValueError, match="set entropy_run in the recipe"):
        find_entropies(task, {}, random_batch(0))


def test_frozen_parameters_are_rounded_and_hashed():
    params = {"a": jnp.asarray([1.0, 1 / 3]), "b": {"c": jnp.zeros((2, 2))}}
    frozen = freeze(params, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen.params)} == {jnp.dtype(jnp.bfloat16)}
    assert frozen.content_hash == content_hash(frozen.params)
    other = {**params, "a": params["a"].at[1].add(0.01)}
    assert freeze(other, jnp.bfloat16).content_hash != frozen.content_hash != freeze(params).content_hash
    assert content_hash({"x": params["a"]}) != content_hash({"y": params["a"]})


@pytest.mark.slow(days=28, group="costly", turn="training/test_step", every="2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_of_the_trained_part_alone(accumulate):
    """The head is trained on a frozen base; with the whole model trained, its gradient is the same."""
    task, _, params = build(TinyConfig())
    batch = random_batch(0)
    sgd = optax.trace(0.9)  # the gradient is the update
    base = {name: part for name, part in params.items() if name != "head"}
    frozen = {BASE: freeze(copy(base))}
    step = make_train_step(task, sgd, accumulate=accumulate)
    whole, expected = step(start(copy(params), sgd), batch)
    state = start({"head": copy(params["head"])}, sgd, copy(frozen))
    assert len(jax.tree.leaves(state.opt_state)) == 1 < len(jax.tree.leaves(base))
    after, metrics = step(state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(start({"head": params["head"]}, sgd, frozen))
    jax.tree.map(np.testing.assert_array_equal, after.frozen, frozen)
    assert not np.array_equal(after.params["head"]["kernel"], params["head"]["kernel"])
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    assert_trees_close(after.params["head"], whole.params["head"], **tol(jnp.float32, batch.inputs.size))
    assert float(metrics["grad_norm"]) < float(expected["grad_norm"])
    trained = {"head": params["head"]}
    flow = jax.jit(jax.grad(lambda f: jnp.sum(predict(task, trained, f, batch, {})[0])))(frozen)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(flow))


def test_trained_parameters_lie_over_the_base():
    base = {"a": {"kernel": jnp.zeros(2), "bias": jnp.zeros(1)}, "b": jnp.zeros(3)}
    trained = {"a": {"kernel": jnp.ones(2), "lora": jnp.ones(4)}}
    found = whole_params(trained, {BASE: freeze(base)})
    assert jax.tree.map(lambda x: (x.shape, float(x[0])), found, is_leaf=lambda x: hasattr(x, "shape")) == {
        "a": {"kernel": ((2,), 1.0), "bias": ((1,), 0.0), "lora": ((4,), 1.0)},
        "b": ((3,), 0.0),
    }
    assert whole_params(trained, {}) is trained


@pytest.mark.slow(days=28, group="costly", turn="training/test_step")
def test_evaluation_sums_losses_and_those_of_chosen_targets():
    task, adamw, params = build(TinyConfig())
    state = start(params, adamw)
    batch = random_batch(0)
    ids = (ord("A") + 4, ord("C") + 4)
    sums = make_eval_step(task, targets=ids)(state, batch, 0)
    logits, _ = jax.jit(task.model.apply)({"params": params}, batch.inputs, segment_ids=batch.segment_ids)
    log_p = scipy.special.log_softmax(np.asarray(logits), -1)
    picked = np.take_along_axis(log_p, np.asarray(batch.targets)[..., None], -1)[..., 0]
    scored = np.asarray(batch.loss_mask) == 1
    chosen = scored & np.isin(np.asarray(batch.targets), ids)
    for mask, name in ((scored, ""), (chosen, "target_")):
        np.testing.assert_allclose(sums[f"{name}nll"], -picked[mask].sum(), rtol=1e-5)
        assert float(sums[f"{name}weight"]) == mask.sum()
