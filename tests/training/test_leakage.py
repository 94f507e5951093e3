"""Documents of one row never see each other, however a recipe's data packs them, and each scores as it does alone."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data import BytesSource, DataConfig
from jaxblt.data.vocab import OFFSET
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig, HyenaConfig, ImplicitFilter, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.run import Run
from jaxblt.training.objectives.objectives import Masked
from jaxblt.training.recipe import Recipe
from jaxblt.training.start.setup import (
    Setup,
    init_params,
    make_setup,
    make_task,
    open_data,
    recipe_step,
)
from jaxblt.training.state import ENTROPY, Frozen, start
from jaxblt.training.step import predict
from jaxblt.training.train_config import TrainConfig
from tests.mixer_table import table
from tests.tolerances import assert_close

MESH = make_mesh(devices=jax.devices()[:1])
ALONE = [{"packing": "windows"}, {"packing": "buckets"}]
PACKED = [{"packing": "first_fit"}, {"packing": "sequential"}]
# more taps than Toeplitz blocks take: an FFT
IMPLICIT = HyenaConfig(dim=8, filter=ImplicitFilter(filter_len=1024, width=8), packed=False)


def stack(pattern: str, *, causal: bool = True) -> StackConfig:
    """Mixers that are promised one document a row, as those of a recipe for windows may be."""
    return StackConfig(
        dim=8,
        num_layers=len(pattern),
        pattern=pattern,
        mlp_dim=0,
        causal=causal,
        mixers=table(
            hyena=HyenaConfig(dim=8, filter=ModalFilter(modes=2), packed=False),
            attention=AttentionConfig(dim=8, num_heads=2, packed=False),
            window=8,
            I=IMPLICIT,
            R=GatedRecurrenceConfig(dim=8),
        ),
        scan=False,
    )


def blt(encoder: str, latent: str, decoder: str, *, causal: bool = True) -> BLTConfig:
    stacks = [stack(pattern, causal=causal) for pattern in (encoder, latent, decoder)]
    return BLTConfig(*stacks, hash=HashConfig(sizes=(2, 3), table_size=16), bridge_heads=2)


def recipe_of(model: Any, *, seq_len: int = 64, **options: Any) -> Recipe:
    """Of windows, each of one document."""
    data = DataConfig(seq_len=seq_len, batch_size=4, split="names", **options.pop("data", {}))
    return Recipe(name="leak", model=model, data=data, train=TrainConfig(dtype="float32"), **options)


MODELS = {
    "bytes": recipe_of(ByteLMConfig(stack=stack("HIMAWR"), hash=HashConfig(sizes=(2, 3), table_size=16))),
    "bytes_aligned": recipe_of(ByteLMConfig(stack=stack("HIM")), seq_len=256, data={"alignment": 128}),
    "patches": recipe_of(
        blt("W", "HA", "M"),
        patcher=PatcherConfig(mode="entropy", threshold=4.0, block_size=16, capacity=12),
        entropy_model=ByteLMConfig(stack=stack("A")),
    ),
    "patches_both_ways": recipe_of(
        blt("W", "IA", "S", causal=False),
        # documents start at multiples of 256 bytes and of 128 slots
        patcher=PatcherConfig(mode="static", patch_size=2, block_size=256),
        objective=Masked(),
        seq_len=512,
    ),
}

SMALL = recipe_of(ByteLMConfig(stack=stack("HA")))


class Program(NamedTuple):
    """A recipe's model as its steps run it, with parameters."""

    setup: Setup
    params: Any
    frozen: dict[str, Frozen]
    logits: Any

    def __call__(self, batch: Any) -> np.ndarray:
        return np.asarray(self.logits(self.params, self.frozen, batch))


def draw(shapes: Any, seed: int) -> Any:
    """Parameters at which modes last long and every mixer moves the logits."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: Any) -> Any:
        slow = -3.0 if "log_rate" in jax.tree_util.keystr(path) else 0.0
        return jax.device_put(rng.normal(slow, 0.7, shape.shape).astype(np.float32))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@cache
def program(name: str, *, packed: bool) -> Program:
    """Rows of one document make one program, packed rows another, whatever packed them."""
    recipe = packed_as(name, PACKED[0] if packed else ALONE[0])
    frozen = {}
    if recipe.entropy_model is not None:
        task = make_task(recipe)
        entropy = replace(task, model=task.entropy_model)
        shapes = nn.meta.unbox(jax.eval_shape(partial(init_params, entropy, recipe.data, 0)))
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draw(shapes, 1))
        frozen = {ENTROPY: Frozen(rounded, "drawn")}
    setup = make_setup(recipe, MESH, frozen)
    task = replace(setup.task, packed=True)
    logits = jax.jit(lambda params, frozen, batch: predict(task, params, frozen, batch, {})[0])
    return Program(setup, draw(setup.abstract.params, 0), frozen, logits)


def packed_as(name: str, data: dict[str, Any]) -> Recipe:
    return replace(MODELS[name], data=replace(MODELS[name].data, **data))


@cache
def documents(longest: int) -> BytesSource:
    """Short and long ones; several fit in a row."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 16, longest // 2, 14)
    letters = np.frombuffer(b"abcdefgh ", np.uint8)
    return BytesSource([letters[rng.integers(0, 9, n)].tobytes() for n in lengths])


def batches(recipe: Recipe) -> list[Any]:
    data = open_data(recipe, MESH, mode="eval", source=documents(recipe.data.seq_len))
    return [data.batch(step) for step in range(data.num_batches or 0)]


def other_letters(batch: Any, where: np.ndarray) -> Any:
    """The batch with other bytes in these places."""
    drawn = np.random.default_rng(1).integers(OFFSET + ord("i"), OFFSET + ord("z"), where.shape)
    return replace(batch, inputs=np.where(where, drawn, batch.inputs).astype(np.int32))


@pytest.mark.slow(days=28, group="whole runs", every="patches-first_fit")
@pytest.mark.parametrize("data", PACKED, ids=lambda data: data["packing"])
@pytest.mark.parametrize("name", MODELS)
def test_a_document_never_sees_its_neighbours(name, data):
    run, seen = program(name, packed=True), 0
    for batch in batches(packed_as(name, data)):
        for changed in (0, 1):
            odd = batch.segment_ids % 2 == changed
            kept = (batch.segment_ids > 0) & ~odd
            found, expected = (run(b)[kept] for b in (other_letters(batch, odd), batch))
            assert_close(found, expected, n=batch.inputs.shape[1])
            seen += int((batch.segment_ids > 1).any(1).sum())
    assert seen > 2


@pytest.mark.slow(days=28, group="whole runs")
def test_a_step_learns_from_a_document_what_it_learns_without_its_neighbour():
    recipe = replace(SMALL, data=replace(SMALL.data, **PACKED[0]))
    setup = make_setup(recipe, MESH)
    step = recipe_step(setup)
    batch = open_data(recipe, MESH, source=documents(64)).batch(0)
    odd = batch.segment_ids % 2 == 1
    batch = replace(batch, loss_mask=batch.loss_mask * ~odd)
    assert batch.loss_mask.sum() > 20
    found = []
    for rows in (other_letters(batch, odd), batch):
        state = start(draw(setup.abstract.params, 0), setup.optimizer, None)
        state, metrics = step(state, rows)
        found.append((metrics["loss"], metrics["grad_norm"], state.params))
    jax.tree.map(lambda a, b: assert_close(a, b, n=batch.inputs.size), *found)


def by_document(name: str, data: dict[str, Any]) -> dict[bytes, np.ndarray]:
    """The logits of each document, by its bytes."""
    run, found = program(name, packed=data in PACKED), {}
    for batch in batches(packed_as(name, data)):
        logits = run(batch)
        for row, segment in {(r, s) for r, s in np.argwhere(batch.segment_ids)}:
            place = batch.segment_ids[row] == batch.segment_ids[row, segment]
            found[batch.targets[row][place].tobytes()] = logits[row][place]
    return found


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize("name", ["bytes", "patches"])
def test_a_document_scores_alike_in_every_packing(name):
    expected = by_document(name, ALONE[0])
    assert len(expected) == 14
    for data in (ALONE[1], *PACKED):
        found = by_document(name, data)
        assert found.keys() == expected.keys()
        for key, logits in found.items():
            assert_close(logits, expected[key], n=len(logits))


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_of_windows_is_scored_on_packed_rows():
    setup = make_setup(SMALL, MESH)
    run = Run(SMALL, 0, setup.task, draw(setup.abstract.params, 0), {})
    alone, together = (
        run.evaluate("train", data=replace(SMALL.data, batch_size=8, **data), source=documents(64))
        for data in (ALONE[1], PACKED[0])
    )
    assert together["bytes"] == alone["bytes"] > 200
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
