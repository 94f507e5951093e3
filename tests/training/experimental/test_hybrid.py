"""Weights of a loss by step, imitation of labels, and steps and runs in which routers alone are reinforced."""

import shutil
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxblt.adapters import AdapterConfig, ChunkMean, Draw, RouterConfig, attach, split_params
from jaxblt.adapters.update.params import without_routers
from jaxblt.cli.recipe_options import parse_recipe
from jaxblt.data import TaskDataConfig, make_dataset
from jaxblt.data.labelled import LabelledDataConfig
from jaxblt.data.tasks import ListOpsFiles
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.training.experimental.acting import Acting, acting_params, keep_routers
from jaxblt.training.experimental.hybrid import Hybrid, HybridNextByte, combined, make_weight, routed_parts
from jaxblt.training.experimental.imitated_labels import label_nats
from jaxblt.training.experimental.policy import PolicyConfig
from jaxblt.training.log.report import costs_by_length, model_cost
from jaxblt.training.loop import fit
from jaxblt.training.metrics import cross_entropy
from jaxblt.training.objectives.objectives import NextByte
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.setup import Setup, make_task
from jaxblt.training.state import BASE, freeze, start
from jaxblt.training.step import Task, make_train_step
from jaxblt.training.stored.resolved import Resolved, write_resolved
from jaxblt.training.stored.serialize import decode, encode, from_json, to_json
from tests.adapters.routing import TURNS
from tests.parameters import drawn
from tests.training.tiny import Letters, random_batch, tiny_recipe

BANK = AdapterConfig(
    sites=("mlp/down",),
    rank=4,
    blocks=2,
    router=RouterConfig(chunk=4, reads=(ChunkMean(),), hidden=4),
    code=(Draw(),),
)
PLAIN = ByteLMConfig(stack=StackConfig(dim=8, num_layers=1, pattern=("recurrence",), mlp_dim=8))
MODEL = attach(PLAIN, BANK)
ALONE = {"language": ((0, 0.0),), "reinforcement": ((0, 1.0),)}
PPO = HybridNextByte(**ALONE, policy=PolicyConfig("ppo", flip_price=0.1, refresh=2))
SHORT = {"steps": 4, "eval_every": 0, "checkpoint_every": 2, "checkpoint_every_s": None, "log_every": 1} | {
    "optimizer": AdamWConfig(learning_rate=1e-2, warmup_steps=0)
}


def test_weights_by_hand():
    """Linear between points, constant before the first and behind the last."""
    weight = make_weight(((2, 1.0), (6, 0.0), (8, 0.5)))
    found = [float(weight(step)) for step in (0, 2, 3, 6, 7, 8, 99)]
    np.testing.assert_allclose(found, [1, 1, 0.75, 0, 0.25, 0.5, 0.5], atol=1e-7)
    assert float(make_weight(((0, 0.3),))(7)) == np.float32(0.3)


def test_parts_are_weighed_by_hand():
    config = HybridNextByte(
        language=((0, 1.0), (10, 0.0)), labels=((0, 0.5),), reinforcement=((5, 0.0), (10, 2.0))
    )
    parts = {"language": 3.0, "reference": 5.0, "labels": 7.0, "reinforcement": 11.0}
    parts = {name: jnp.float32(value) for name, value in parts.items()}
    for step, wanted in (
        (0, 3 + 5 + 3.5),
        (5, 1.5 + 5 + 3.5),
        (8, 0.6 + 5 + 3.5 + 1.2 * 11),
        (99, 5 + 3.5 + 22),
    ):
        np.testing.assert_allclose(combined(Hybrid(config, None), parts, jnp.int32(step)), wanted, rtol=1e-6)
    assert combined(None, {"language": parts["language"]}, jnp.int32(0)) == 3


def test_imitated_labels_by_hand():
    shares = jnp.asarray([[[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]])
    side = {"intermediates": {"stack": {"router": {"shares": (shares,)}}}}
    batch = jax.tree.map(lambda x: x[:1, :3], random_batch(0, 1, 8))
    batch = replace(batch, loss_mask=jnp.asarray([[1.0, 1.0, 1.0]]))
    found = label_nats(side, replace(batch, labels=jnp.asarray([[1, -1, 1]], jnp.int32)))
    np.testing.assert_allclose(found, -np.log(0.75) - np.log(0.1), rtol=1e-6)
    found = label_nats(side, replace(batch, labels=jnp.asarray([0], jnp.int32)))
    np.testing.assert_allclose(found, -np.log(0.25) - np.log(0.5) - np.log(0.9), rtol=1e-6)
    blocks = {"periods": {"block_0": {"router": {"shares": (jnp.stack([shares, 1 - shares]),)}}}}
    side = {"intermediates": {"stack": blocks}}
    found = label_nats(side, replace(batch, labels=jnp.asarray([[1, -1, 1]], jnp.int32)))
    np.testing.assert_allclose(found, -np.log([0.75, 0.1, 0.25, 0.9]).sum(), rtol=1e-6)
    for labels in (None, jnp.asarray([0.5]), {"task": jnp.asarray([0])}):
        with pytest.raises(ValueError, match=r"the batch has no classes of one task: use data with such"):
            label_nats(side, replace(batch, labels=labels))


def test_hard_negatives_by_hand():
    """Only the right expert and the hardest wrong one have a gradient, and none where the margin is met."""
    shares = jnp.asarray([[[0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.6, 0.1, 0.3]]])
    batch = jax.tree.map(lambda x: x[:1, :3], random_batch(0, 1, 8))
    labels = jnp.asarray([[0, 1, -1]], jnp.int32)
    batch = replace(batch, loss_mask=jnp.asarray([[1.0, 1.0, 1.0]]), labels=labels)
    config = HybridNextByte(negatives=((0, 2.0),), margin=1.5)

    def total(shares, config=config):
        side = {"intermediates": {"router": {"shares": (shares,)}}}
        hybrid, logits = Hybrid(config, None), jnp.zeros((1, 3, 260))
        parts, sums = routed_parts(hybrid, lambda *_, **__: (None, None, side), {}, logits, None, batch)
        return combined(hybrid, parts, jnp.int32(0)), sums

    (found, sums), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(shares)
    np.testing.assert_allclose(found, 2 * (1.5 - np.log(0.2) + np.log(0.5)), rtol=1e-6)
    np.testing.assert_allclose(sums["negative_nats"], found / 2, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [[-10, 4, 0], [0, 0, 0], [0, 0, 0]], rtol=1e-5)
    assert total(shares, HybridNextByte(labels=((0, 1.0),)))[1].keys() == {"label_nats"}


@TURNS
@pytest.mark.parametrize("per", ["stack", "block"])
def test_routers_imitate_the_labels_of_a_batch(per):
    """Rows of other letters have another label: its nats fall to those of bytes before the first code, log 2 each.

    With a router in each of two blocks that is twice the sum.
    """
    parts = [random_batch(0, letters=letters) for letters in (b"AC", b"GT")]
    batch = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    batch = replace(batch, labels=jnp.asarray([0] * 4 + [1] * 4, jnp.int32))
    blocks = {"stack": 1, "block": 2}[per]
    plain = replace(PLAIN, stack=replace(PLAIN.stack, num_layers=blocks))
    model = attach(plain, replace(BANK, code=(), router=replace(BANK.router, per=per))).build()
    base, trained = split_params(
        drawn(model, batch.inputs, seed=8)["params"]
    )  # a router that is mostly wrong
    optimizer, told = optax.sgd(0.3), HybridNextByte(language=((0, 0.0),), labels=((0, 1.0),))
    step = make_train_step(Task(model, hybrid=Hybrid(told, None)), optimizer)
    state, nats = start(jax.tree.map(jnp.copy, trained), optimizer, {BASE: freeze(base)}), []
    for _ in range(40):
        state, seen = step(state, batch)
        nats.append(float(seen["label_nats"]))
    early = np.log(2) * 2 * 4 / (15 + 11)  # four bytes of both documents, of which 15 and 11 are scored
    assert blocks * early < nats[-1] < 1.1 * blocks * early
    assert nats[0] > 1
    jax.tree.map(np.testing.assert_array_equal, without_routers(state.params), without_routers(trained))


@pytest.fixture(scope="module")
def stepped():
    """A state and two PPO steps from it on one batch, in which adapters and the embedding could be trained."""
    batch, model = random_batch(0), MODEL.build()
    base, trained = split_params(drawn(model, batch.inputs)["params"], ("embedding/*",))
    task = Task(model, hybrid=Hybrid(PPO, PLAIN.build()))
    optimizer = keep_routers(optax.sgd(0.5), 2)
    copied = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
    begun = start(copied(trained), optimizer, {BASE: freeze(copied(base))})
    step = make_train_step(task, optimizer)
    first, seen = step(jax.tree.map(jnp.copy, begun), batch)
    second, later = step(jax.tree.map(jnp.copy, first), batch)
    return trained, base, batch, (first, second), (seen, later)


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/test_hybrid")
def test_only_routers_learn_from_rewards(stepped):
    trained, _, _, (first, _), (seen, _) = stepped
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), first.params, trained)
    assert moved.keys() == {"embedding", "stack"}
    for path, size in jax.tree.leaves_with_path(moved):
        assert (size > 0) == (path[1].key == "router"), path
    assert seen["clipped"] == 0
    np.testing.assert_allclose(seen["policy_kl"], 0, atol=1e-6)
    assert 0 < seen["flips"] < 1


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/test_hybrid")
def test_the_routers_that_act_are_two_updates_old_at_most(stepped):
    trained, _, _, (first, second), (_, later) = stepped
    router = lambda tree: tree["stack"]["router"]  # noqa: E731
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, router(a), router(b))  # noqa: E731
    assert isinstance(first.opt_state, Acting)
    same(acting_params(first.opt_state, first.params, 2), trained)
    same(acting_params(second.opt_state, second.params, 2), second.params)
    assert later["policy_kl"] > 0


@pytest.mark.slow(days=28, group="costly", turn="training/experimental/test_hybrid")
def test_rewards_are_base_nats_minus_adapted_nats(stepped):
    """And the price of flips: of the whole batch it is the difference of two losses, whatever was drawn."""
    _, base, batch, _, (seen, _) = stepped
    weights = batch.loss_mask.astype(jnp.float32)
    logits, _ = jax.jit(PLAIN.build().apply)({"params": base}, batch.inputs, segment_ids=batch.segment_ids)
    nats = jnp.sum(cross_entropy(logits, batch.targets) * weights)
    flips = (
        seen["flips"] * 4 * (3 + 2)
    )  # rows of two documents of four and three chunks, the first without a choice
    np.testing.assert_allclose(flips, round(float(flips)), rtol=1e-6)
    wanted = (nats - 0.1 * flips) / jnp.sum(weights) - seen["loss"]
    np.testing.assert_allclose(seen["reward"], wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory):
    """A bank over a base, trained by straight-through choices of experts."""
    folder = tmp_path_factory.mktemp("runs")
    options = SHORT | {"steps": 2}
    fit(tiny_recipe(model=PLAIN, **options), folder / "base", source=Letters(), devices=jax.devices()[:1])
    recipe = tiny_recipe(model=MODEL, base_run=str(folder / "base"), **options)
    fit(recipe, folder / "bank", source=Letters(), devices=jax.devices()[:1])
    return folder / "bank"


@TURNS
def test_a_run_reinforces_frozen_experts_and_goes_on_bit_by_bit(adapted_run, tmp_path):
    recipe = tiny_recipe(
        model=MODEL,
        init_from=str(adapted_run),
        freeze=("embedding/*", "stack/periods/*", "head/*"),
        objective=PPO,
        **SHORT,
    )
    train = lambda folder: fit(recipe, tmp_path / folder, source=Letters(), devices=jax.devices()[:1])  # noqa: E731
    fitted = train("a")
    assert set(fitted.state.params["stack"]) == {"router"}
    assert set(fitted.state.params) == {"stack"}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "4")
    jax.tree.map(np.testing.assert_array_equal, train("b").state, fitted.state)
    assert "reward" in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_a_hybrid_is_named_in_recipes_and_on_the_command_line(tmp_path):
    recipe = tiny_recipe(model=MODEL, objective=replace(PPO, language=((0, 1.0), (100, 0.0))))
    assert from_json(to_json(recipe)) == recipe
    write_resolved(tmp_path, Resolved(tiny_recipe(model=MODEL, objective=HybridNextByte()), {}))
    words = "--objective.labels 0 1.0 50 0.0 --objective.reinforcement 50 0.0 100 1.0 --objective.policy.method ppo"
    found, _ = parse_recipe([str(tmp_path), *words.split()], prog="jaxblt train", about="")
    wanted = HybridNextByte(
        labels=((0, 1.0), (50, 0.0)), reinforcement=((50, 0.0), (100, 1.0)), policy=PolicyConfig("ppo")
    )
    assert found.objective == wanted


def test_weights_that_stood_beside_an_objective_are_read_as_part_of_it():
    old = encode(tiny_recipe(model=MODEL, objective=NextByte(label_smoothing=0.1)))
    found = decode(old | {"hybrid": {"class": "hybrid", "labels": [[0, 1.0]]}})
    assert found.objective == HybridNextByte(label_smoothing=0.1, labels=((0, 1.0),))
    assert decode(old | {"hybrid": None}).objective == NextByte(label_smoothing=0.1)


def test_a_hybrid_over_a_frozen_base_is_counted():
    """Its bare base has no bank, which a hybrid asks for."""
    recipe = tiny_recipe(model=MODEL, base_run="runs/base", objective=PPO)
    task = make_task(recipe)
    whole = jax.eval_shape(task.model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    setup = Setup(
        recipe,
        Mesh(jax.devices()[:1], "data"),
        task,
        optax.identity(),
        float,
        whole,
        whole,
        start({}, optax.identity()),
    )
    data = make_dataset(recipe.data, split="train", source=Letters())
    all_trained = model_cost(task, nn.meta.unbox(whole), recipe.data.seq_len)
    assert 0 < costs_by_length(setup, data)[recipe.data.seq_len].byte < all_trained.byte


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: HybridNextByte(language=()),
            r"must be \(step, weight\) pairs with rising steps from 0 on, got \(\)",
        ),
        (
            lambda: HybridNextByte(labels=((5, 1.0), (5, 2.0))),
            "HybridNextByte.labels must be .* rising steps",
        ),
        (lambda: HybridNextByte(language=((0, -1.0),)), "must hold weights of at least 0"),
        (lambda: HybridNextByte(language=((0, 0.0),), reference=((0, 0.0),)), "nothing would be trained"),
        (
            lambda: tiny_recipe(objective=PPO),
            "no stack of the model has one: attach an AdapterConfig with blocks",
        ),
        (
            lambda: tiny_recipe(model=attach(PLAIN, replace(BANK, code=())), objective=PPO),
            r"no bank draws its experts: set AdapterConfig.code = \(Draw\(\),\)",
        ),
        (
            lambda: replace(
                tiny_recipe(model=MODEL, objective=HybridNextByte(labels=((0, 1.0),))),
                data=LabelledDataConfig(paths=("a.tsv",), classes=("a", "b", "c")),
            ),
            r"HybridNextByte.labels may be of 3 classes, and a bank has 2 experts: set AdapterConfig.blocks = 3",
        ),
        (
            lambda: replace(
                tiny_recipe(model=MODEL, objective=HybridNextByte(labels=((0, 1.0),))),
                data=TaskDataConfig(task=ListOpsFiles(path="a"), seq_len=2002, labels="symbol"),
            ),
            r"HybridNextByte.labels may be of 10 classes, and a bank has 2 experts: set AdapterConfig.blocks = 10",
        ),
        (
            lambda: tiny_recipe(model=MODEL, objective=PPO, mesh={"seq": 2}),
            "use a model without patches and mesh.seq = 1",
        ),
    ],
)
def test_what_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()
