"""Routers that search an index, from the command that makes one to a run over its base that is read back."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import (
    AdapterConfig,
    ChunkMean,
    Neighbours,
    RouterConfig,
    attach,
    join_params,
    load_index,
    split_params,
)
from jaxblt.adapters.retrieval import save_index
from jaxblt.answers import build_index
from jaxblt.cli.main import main
from jaxblt.data.config import apply_split, open_source
from jaxblt.data.keys import document_key
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.parallel import make_mesh
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.setup import make_task, open_data
from jaxblt.training.state import BASE, content_hash
from jaxblt.training.step import predict
from jaxblt.training.stored.resolved import read_resolved
from tests.training.tiny import tiny_recipe

CHUNK = 8
MODEL = ByteLMConfig(stack=StackConfig(dim=16, num_layers=1, pattern=("hyena_short",), mlp_dim=16))
SHORT = {"steps": 2, "eval_every": 0, "checkpoint_every": 2, "checkpoint_every_s": None} | {
    "optimizer": AdamWConfig(learning_rate=1e-2, warmup_steps=0)
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Twelve documents of 20 to 130 letters, each with letters of its own."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    rows = [rng.choice(list("ACGTNXYZ"[i % 5 : i % 5 + 3]), 20 + 10 * i) for i in range(12)]
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": "".join(row)}) + "\n" for row in rows))
    return folder, {"paths": (str(file),), "kind": "jsonl", "packing": "first_fit", "split": "documents"}


@pytest.fixture(scope="module")
def base_run(paths):
    folder, data = paths
    fit(tiny_recipe(model=MODEL, data=data, **SHORT), folder / "base", devices=jax.devices()[:1])
    return folder / "base"


@pytest.fixture(scope="module")
def index(base_run, paths):
    options = ["--chunk", str(CHUNK), "--neighbours", "3"]
    main(["index", str(base_run), "--out", str(paths[0] / "index"), *options])
    return load_index(paths[0] / "index")


def recipe_over(base_run, paths, /, *, chunk=CHUNK, **options):
    reads = (ChunkMean(), Neighbours(str(paths[0] / "index"), capacity=128, count=3))
    adapter = AdapterConfig(rank=2, router=RouterConfig(chunk=chunk, reads=reads, hidden=8))
    fields = SHORT | {"base_run": str(base_run), "data": paths[1]} | options
    return tiny_recipe(model=attach(MODEL, adapter), **fields)


@pytest.fixture(scope="module")
def run(base_run, paths, index):
    fit(recipe_over(base_run, paths), paths[0] / "run", devices=jax.devices()[:1])
    return jaxblt.load(paths[0] / "run")


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_the_command_indexes_the_documents_that_are_trained_on(index, base_run, paths, capsys):
    data = tiny_recipe(model=MODEL, data=paths[1]).data
    part = apply_split(data, open_source(data), "train")
    expected = {}
    for i, length in enumerate(part.lengths.tolist()):
        key = document_key(part.source, int(part.documents[i]))
        expected[key] = sum(min(32, length - start) // CHUNK for start in range(0, length, 32))
    keys, counts = np.unique(index.owners, return_counts=True)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {k: n for k, n in expected.items() if n}
    assert len(expected) > 5
    words = ["--chunk", str(CHUNK), "--neighbours", "3", "--most", "5"]
    main(["index", str(base_run), "--out", str(paths[0] / "few"), *words])
    assert "5 chunks of 8 steps of" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="nothing is overwritten: choose another name"):
        main(["index", str(paths[0] / "no run"), "--out", str(paths[0] / "few")])
    few = load_index(paths[0] / "few").owners.tolist()
    order = list(dict.fromkeys(index.owners.tolist()))
    assert few == sorted(few, key=order.index)
    assert few[0] == order[0]
    assert len(set(few)) > 2


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_the_index_is_the_base_s_and_is_kept_by_the_run(run, index, paths):
    held = run.params["stack"]["router"]["index"]
    np.testing.assert_array_equal(held["vectors"][: len(index)], index.vectors)
    assert not np.asarray(held["vectors"][len(index) :]).any()
    base = split_params(run.params)[0]
    assert base["stack"]["router"].keys() == {"index"}
    assert content_hash(base) == read_resolved(paths[0] / "run").frozen[BASE]
    assert run.base_hash == jaxblt.load(paths[0] / "base").base_hash
    moved = jax.tree.leaves_with_path(jaxblt.load(paths[0] / "base").params)
    for path, leaf in moved:
        found = run.params
        for entry in path:
            found = found[entry.key]
        np.testing.assert_array_equal(found, leaf)


def batch_of(run):
    data = open_data(run.recipe, make_mesh(devices=jax.devices()[:1]), mode="eval")
    return jax.tree.map(jnp.asarray, data.batch(0))


def drawn(run):
    """Parameters of the run with adapters that do something."""
    rng = np.random.default_rng(1)

    def draw(path, x):
        names = [entry.key for entry in path]
        own = "adapter" in names or ("router" in names and "index" not in names)
        return jnp.asarray(rng.standard_normal(x.shape), jnp.float32) if own else x

    return jax.tree_util.tree_map_with_path(draw, run.params)


@pytest.fixture(scope="module")
def outputs(run):
    """Logits of training rows from parameters, whose documents are told or not: one program each."""
    task, batch = replace(make_task(run.recipe), packed=True), batch_of(run)

    @jax.jit
    def logits(params, rows):
        return predict(task, params, {}, rows, {})[0]

    def ask(params, *, told=True):
        return np.asarray(logits(params, batch if told else replace(batch, documents=None)))

    return batch, ask


def with_index(params, arrays):
    return join_params(params, {"stack": {"router": {"index": jax.tree.map(jnp.asarray, arrays)}}})


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_another_index_changes_what_is_routed_and_not_the_base(run, index, outputs):
    batch, ask = outputs
    mine = drawn(run)
    other = replace(index, vectors=np.roll(index.vectors, 3, 1), norms=index.norms).params(128)
    live = np.asarray(batch.segment_ids) > 0
    moved = np.abs(ask(with_index(mine, other)) - ask(mine)).max(-1)
    assert moved[live & (np.asarray(batch.positions) < CHUNK)].max() == 0
    assert moved[live].max() > 1e-2

    def silent(path, x):
        return jnp.zeros_like(x) if path[-1].key == "u" else x

    base = jax.tree_util.tree_map_with_path(silent, mine)
    np.testing.assert_array_equal(ask(with_index(base, other)), ask(base))


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_no_document_finds_itself(run, index, outputs):
    """Its row is that of an index without its chunks, and is another one where the batch does not say whose it is."""
    batch, ask = outputs
    mine = drawn(run)
    keys = np.unique(np.asarray(batch.documents))
    key = max(keys[keys > 0].tolist(), key=lambda k: int((index.owners == k).sum()))
    place = np.asarray(batch.documents) == key
    arrays = index.params(128)
    arrays["vectors"] = np.where(
        np.pad(index.owners == key, (0, 128 - len(index)))[:, None], 0, arrays["vectors"]
    )
    np.testing.assert_array_equal(ask(with_index(mine, arrays))[place], ask(mine)[place])
    assert np.abs(ask(mine, told=False) - ask(mine))[place].max() > 1e-3


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_decoding_gives_the_logits_of_whole_rows(run):
    model, params = run.model, {"params": drawn(run)}
    ids = jnp.asarray(np.random.default_rng(2).integers(4, 260, (2, 24)), jnp.int32)
    whole = jax.jit(lambda ids: model.apply(params, ids)[0])(ids)
    step = jax.jit(lambda ids, state: model.apply(params, ids, state, method="stream"))
    state, found = model.init_state(2, num_bytes=24), []
    for at in range(0, 24, 3):
        logits, state = step(ids[:, at : at + 3], state)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=1e-4, atol=1e-4)
    assert np.isfinite(whole).all()


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chunk": 4}, r"has chunk 8, expected 4: set RouterConfig.chunk = 8"),
        (
            {"also_train": ("embedding",)},
            r"also_train=\('embedding',\) changes the base .*: leave also_train out",
        ),
        (
            {"base_run": None},
            r"\['stack'\] search an index of a frozen base, and base_run is None: set base_run",
        ),
    ],
)
def test_what_is_refused(index, base_run, paths, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        fit(recipe_over(base_run, paths, **changes), tmp_path / "run", devices=jax.devices()[:1])
    assert "\n" not in str(caught.value)


@pytest.mark.slow(days=28, group="costly", turn="training/test_retrieval")
def test_an_index_of_another_base_is_refused(index, run, base_run, paths, tmp_path):
    save_index(replace(index, base="0" * 64), tmp_path / "other")
    recipe = recipe_over(base_run, (tmp_path, paths[1]))
    router = recipe.model.stack.adapter.router
    reads = (ChunkMean(), replace(router.reads[1], index=str(tmp_path / "other")))
    adapter = replace(recipe.model.stack.adapter, router=replace(router, reads=reads))
    with pytest.raises(
        ValueError, match=r"base of content hash 0{64}, expected .*: make an index of this base"
    ):
        fit(replace(recipe, model=attach(MODEL, adapter)), tmp_path / "run", devices=jax.devices()[:1])
    with pytest.raises(
        ValueError, match=r"'tiny' has adapters over base_run=.*: make the index of that base"
    ):
        build_index(run)
