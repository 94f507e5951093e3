"""Entropies of windows that begin inside a document: computed in the step they are those of the whole document."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data import BytesSource, DataConfig, make_dataset, write_entropies
from jaxblt.data.history import History
from jaxblt.data.vocab import PAD, encode
from jaxblt.mixers import AttentionConfig
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig, init_byte_lm_state
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig, init_contexts, stream_entropies
from jaxblt.training.start.setup import entropy_history, open_data
from jaxblt.training.state import ENTROPY, freeze_entropy, widen
from jaxblt.training.step import Task, find_entropies
from tests.mixer_table import table
from tests.tolerances import tol
from tests.training.tiny import TinyConfig, tiny_recipe

RNG = np.random.default_rng(0)
SOURCE = BytesSource([RNG.integers(0, 256, n).astype(np.uint8).tobytes() for n in (310, 20, 95)])
LOCAL = StackConfig(
    dim=16,
    num_layers=2,
    pattern="W",
    mlp_dim=0,
    mixers=table(attention=AttentionConfig(dim=16, num_heads=2), window=6),
)
WINDOWED = ByteLMConfig(stack=LOCAL, hash=HashConfig(sizes=(3,), table_size=64))
MODELS = {
    "windows": (WINDOWED, None),
    "attention to all": (
        dataclasses.replace(WINDOWED, stack=dataclasses.replace(LOCAL, pattern="WA")),
        16,
    ),
}


def of_documents(config, params, context):
    """Of the whole documents, as a file of them holds."""

    def apply(params, ids, state, *, segment_ids):
        return config.build().apply({"params": params}, ids, state, segment_ids=segment_ids, method="stream")

    longest = int(SOURCE.lengths.max()) + 1
    table, segments = np.full((3, longest), PAD, np.int32), np.zeros((3, longest), np.int32)
    for row, document in enumerate(SOURCE.documents):
        table[row, : len(document) + 1], segments[row, : len(document) + 1] = encode(document, bos=True), 1
    init = lambda rows, capacity: init_byte_lm_state(config, rows, capacity=capacity)  # noqa: E731
    state = init_contexts(init, 3, longest, context)
    stream = jax.jit(partial(stream_entropies, apply, chunk=128, context=context))
    found = np.asarray(stream(params, jnp.asarray(table), state, segment_ids=jnp.asarray(segments)))
    return [found[row, : len(document) + 1] for row, document in enumerate(SOURCE.documents)]


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize("kind", MODELS)
def test_windows_have_the_entropies_of_their_document(kind, tmp_path):
    config, context = MODELS[kind]
    params = nn.meta.unbox(jax.jit(config.build().init)(jax.random.key(0), jnp.ones((1, 8), jnp.int32)))[
        "params"
    ]
    frozen = freeze_entropy(jax.tree.map(lambda p: 2.0 * p if p.ndim > 1 else p, params))
    file = str(tmp_path / "entropies.npy")
    write_entropies(file, SOURCE, of_documents(config, widen(frozen[ENTROPY].params), context))
    patcher = PatcherConfig(threshold=5.0, block_size=32, entropy_context=context)
    data = {"context": 12, "split": "position", "fractions": (0.6, 0.2, 0.2)}
    recipe = tiny_recipe(patcher=patcher, entropy_model=config, data=data)
    task = Task(BLTConfig().build(patcher=patcher), entropy_model=config.build())
    find = jax.jit(partial(find_entropies, task))
    inside = 0
    for split in ("train", "validation"):
        online = open_data(recipe, make_mesh(), split=split, mode="eval", source=SOURCE)
        given = make_dataset(
            dataclasses.replace(recipe.data, entropies=file), split=split, mode="eval", source=SOURCE
        )
        for step in range(online.num_batches):
            batch = online.batch(step)
            inside += int(np.sum((batch.history[:, -2] != PAD) & (batch.segment_ids[:, 0] == 1)))
            found = find(frozen, jax.tree.map(jnp.asarray, batch))
            np.testing.assert_allclose(found, given.batch(step).entropies, **tol(jnp.float32, n=1024))
    assert inside > 10, "most windows begin inside a document"


def test_what_a_row_is_given():
    history = History(8)
    assert [history.begin(position) for position in (0, 3, 7, 8, 20)] == [0, 0, 0, 1, 13]
    grid = History(8, grid=4)
    assert [grid.begin(position) for position in (0, 3, 4, 7, 8, 11, 12)] == [0, 0, 0, 0, 4, 4, 8]
    with pytest.raises(ValueError, match=r"2 \* grid with a grid, got 8, 3"):
        History(8, grid=3)


def test_a_row_of_the_other_strand_is_given_that_strand():
    letters = np.frombuffer(b"ACGT", np.uint8)[RNG.integers(0, 4, 64)].tobytes()
    config = DataConfig(seq_len=8, batch_size=4, split="position", reverse_complement=True, eos=False)
    data = make_dataset(config, source=BytesSource([letters]))
    data = dataclasses.replace(data, history=History(4))
    other = letters.translate(bytes.maketrans(b"ACGT", b"TGCA"))[::-1]
    strands = [encode(strand, bos=True).tolist() for strand in (letters, other)]
    for step in range(4):
        batch = data.batch(step)
        for history, inputs in zip(batch.history.tolist(), batch.inputs.tolist(), strict=True):
            row = [i for i in history + inputs[1:] if i != PAD]
            assert any(strand[i : i + len(row)] == row for strand in strands for i in range(len(strand)))


def test_recipes_whose_rows_need_none():
    patcher = PatcherConfig(threshold=5.0, block_size=32)
    recipe = tiny_recipe(patcher=patcher, entropy_model=WINDOWED)
    assert entropy_history(recipe) == History(128)
    assert entropy_history(dataclasses.replace(recipe, patcher=None)) is None
    assert entropy_history(dataclasses.replace(recipe, entropy_model=TinyConfig())) is None
    bounded = dataclasses.replace(recipe, patcher=dataclasses.replace(patcher, entropy_context=32))
    assert entropy_history(bounded) == History(32, 16)
    packed = dataclasses.replace(recipe.data, packing="first_fit", alignment=32)
    assert entropy_history(dataclasses.replace(recipe, data=packed)) is None
