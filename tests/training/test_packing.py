"""What is derived from a recipe's data about documents in rows, what contradicts it, and what old runs stored of it."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import configs
from jaxblt.data import BytesSource, TaskDataConfig
from jaxblt.mixers import MACConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.row_layout import promises
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.run import Run
from jaxblt.training import packing
from jaxblt.training.packing import fill_rows
from jaxblt.training.start.frozen import resolve
from jaxblt.training.start.setup import make_task, open_data
from jaxblt.training.stored.resolved import Resolved, adopt, read_resolved, recipe_from_json, write_resolved
from jaxblt.training.stored.serialize import differences, to_json
from tests.training.test_leakage import ALONE, MODELS, PACKED, packed_as, stack
from tests.training.tiny import tiny_recipe


def built(recipe):
    """What the mixers of the recipe's model are told once it is built, by path."""
    return dict(promises(make_task(recipe).model.config, "model"))


@pytest.mark.parametrize("name", configs.RECIPES)
def test_recipes_build_for_one_document_a_row(name):
    """Which is full, except for the examples of tasks, which end in padding. Genes and proteins are packed."""
    recipe = configs.get(name)
    if name in ("genes", "proteins"):
        told = [value for path, value in built(recipe).items() if path.endswith(".packed")]
        assert told
        assert all(told)
        return
    assert make_task(recipe).packed == isinstance(recipe.data, TaskDataConfig)
    told = built(recipe)
    assert told
    assert not any(value for path, value in told.items() if path.endswith(".packed"))


@pytest.mark.parametrize("data", [*ALONE, {"packing": "windows", "partial": "keep"}])
def test_a_tail_of_padding_leaves_one_document_a_row(data):
    recipe = packed_as("patches", data)
    assert make_task(recipe).packed
    assert not any(value for path, value in built(recipe).items() if path.endswith(".packed"))


@pytest.mark.parametrize("data", PACKED)
def test_packed_documents_start_where_blocks_do_in_bytes_and_in_slots(data):
    recipe = packed_as("patches", data | {"alignment": 24})
    assert recipe.data.alignment == 48
    assert replace(recipe, name="again") == replace(recipe, name="again")
    told = built(recipe)
    assert all(value for path, value in told.items() if path.endswith(".packed"))
    assert told["model.encoder.mixers['H'].segment_alignment"] == 48
    assert told["model.latent.mixers['H'].segment_alignment"] == 3 * recipe.patcher.slots == 36
    assert told["model.latent.mixers['I'].segment_alignment"] == 36
    entropy = make_task(recipe).entropy_model.config
    assert entropy.stack.mixers["H"].segment_alignment == 48
    assert entropy.stack.mixers["A"].packed


def test_the_demo_takes_packed_rows():
    """--data.sample udhr --data.packing first_fit --data.stride None --data.partial keep --data.split documents"""
    demo = configs.get("demo")
    packed = {"packing": "first_fit", "stride": None, "partial": "keep"}
    data = replace(demo.data, sample="udhr", split="documents", **packed)
    recipe = replace(demo, data=data)
    assert recipe.data.alignment == recipe.patcher.block_size
    rows = open_data(recipe, make_mesh(devices=jax.devices()[:1]), mode="eval")
    segments = np.concatenate([rows.batch(step).segment_ids for step in range(rows.num_batches)])
    assert segments.max() > 1
    blocks = segments.reshape(len(segments), -1, recipe.patcher.block_size)
    assert ((blocks == blocks[..., :1]) | (blocks == 0)).all()


def test_a_loaded_model_takes_any_segment_ids():
    recipe = MODELS["patches"]
    run = Run(recipe, 0, make_task(recipe), None, {})
    for model in (run.model, run.entropy_model):
        assert all(value in (True, 1) for _, value in promises(model.config, "model"))


def byte_lm(**mixers):
    """Its mixers promise nothing but for these."""
    model = MODELS["bytes"].model
    return {"model": replace(model, stack=replace(model.stack, mixers={**model.stack.mixers, **mixers}))}


def blt(segment_alignment):
    """On patches of 12 slots a block, with this promise to the latent Hyena."""
    recipe = MODELS["patches"]
    latent = recipe.model.latent
    hyena = replace(latent.mixers["H"], segment_alignment=segment_alignment)
    model = replace(recipe.model, latent=replace(latent, mixers={**latent.mixers, "H": hyena}))
    return {"model": model, "patcher": recipe.patcher, "entropy_model": recipe.entropy_model}


ALONE_IN_A_ROW = stack("HA")


MAC = StackConfig(
    dim=8, num_layers=1, pattern="C", mlp_dim=0, mixers={"C": MACConfig(dim=8, num_heads=2, chunk_size=8)}
)


def test_packed_documents_start_where_segments_of_bytes_do():
    data = {"packing": "first_fit", "alignment": 12}
    recipe = tiny_recipe(model=ByteLMConfig(stack=MAC), data=data)
    assert recipe.data.alignment == 24
    assert replace(recipe, name="again").data == recipe.data
    assert tiny_recipe(model=ByteLMConfig(stack=MAC), data=data | {"packing": "buckets"}).data.alignment == 12


@pytest.mark.parametrize(
    ("slots", "seq_len", "block_size", "multiple", "filled"),
    [
        (1016, 8192, 4096, 8, 1024),  # two blocks a row: 2,032 slots become 2,048
        (1000, 8192, 4096, 8, 1024),
        (984, 8192, 4096, 8, 984),  # 1,024 are over a thirty-second more
        (1024, 8192, 4096, 8, 1024),
        (1016, 4096, 4096, 8, 1024),
        (744, 8192, 4096, 24, 744),  # 768 are over a thirty-second more
        (1512, 8192, 4096, 24, 1536),  # keeps to the grid: 1,536 is a multiple of 24 and of 256
        (1008, 8192, 4096, 24, 1008),  # 1,024 is no multiple of 24
        (16, 256, 16, 8, 16),  # the block has no more
        (500, 12_288, 4096, 4, 512),  # three blocks a row
    ],
)
def test_rows_are_filled_up_to_whole_tiles_of_the_kernels(slots, seq_len, block_size, multiple, filled):
    patcher = PatcherConfig(mode="static", patch_size=4, block_size=block_size)
    data = replace(tiny_recipe().data, seq_len=seq_len)
    assert fill_rows(slots, data, patcher, multiple=multiple) == filled


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize(("alignment", "capacity"), [(48, 24), (144, 16)])
def test_calibrated_slots_let_packed_documents_start_where_segments_do(alignment, capacity):
    """Blocks of 48 bytes have up to 12 patches, segments 24 slots, of which three blocks of 16 hold two."""
    recipe = latent_mac(24, PatcherConfig(mode="space", block_size=48), alignment=alignment)
    source = BytesSource([b"a long word " * 4] * 8)
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        recipe, _ = resolve(recipe, open_data(recipe, mesh, source=source), mesh)
    assert (recipe.patcher.capacity, recipe.data.alignment) == (capacity, alignment)
    shapes_of(recipe)


@pytest.mark.slow(days=28, group="costly", every="72-24")
@pytest.mark.parametrize(("wanted", "capacity"), [(512, 16), (72, 24)])
def test_a_run_s_capacity_fills_rows(wanted, capacity, monkeypatch):
    """Of three blocks with 16 slots each: 48 slots a row become 72 where a multiple of that is wanted."""
    monkeypatch.setattr(packing, "ROW_MULTIPLE", wanted)
    monkeypatch.setattr(packing, "MOST_MORE", 0.5)
    recipe = latent_mac(8, PatcherConfig(mode="space", block_size=48), alignment=144)
    recipe = replace(recipe, data=replace(recipe.data, seq_len=144))
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        data = open_data(recipe, mesh, source=BytesSource([b"a long word " * 20] * 8))
        recipe, _ = resolve(recipe, data, mesh)
    assert recipe.patcher.capacity == capacity


@pytest.mark.slow(days=28, group="costly")
def test_what_is_said_of_slots_off_the_grid_helps():
    patcher = PatcherConfig(mode="static", patch_size=2, block_size=48, capacity=20)
    recipe = latent_mac(8, patcher)
    with pytest.raises(
        ValueError, match=r"make data\.alignment 2 times as large .*capacity a multiple of the chunk"
    ):
        shapes_of(recipe)
    shapes_of(replace(recipe, data=replace(recipe.data, alignment=2 * recipe.data.alignment)))
    shapes_of(replace(recipe, patcher=replace(patcher, capacity=24)))


def latent_mac(chunk, patcher, **data):
    """Packed rows of a model whose latent stack has segments of `chunk` slots."""
    model, mac = MODELS["patches"].model, replace(MAC.mixers["C"], chunk_size=chunk)
    model = replace(model, latent=replace(MAC, mixers={"C": mac}))
    recipe = tiny_recipe(model=model, patcher=patcher, data={"packing": "first_fit"})
    return replace(recipe, data=replace(recipe.data, seq_len=288, **data))


def shapes_of(recipe):
    """Of a pass over packed rows."""
    ids = jax.ShapeDtypeStruct((1, recipe.data.seq_len), "int32")
    model = make_task(recipe).model
    return jax.eval_shape(lambda ids: model.init(jax.random.key(0), ids, segment_ids=ids), ids)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            byte_lm(H=ALONE_IN_A_ROW.mixers["H"]),
            r"model\.stack\.mixers\['H'\]\.packed=False promises one document a row, but data\.packing='first_fit' "
            r"puts several in a row: leave `packed` out, as the data decides it, or use data\.packing='buckets'",
        ),
        (byte_lm(A=ALONE_IN_A_ROW.mixers["A"]), r"model\.stack\.mixers\['A'\]\.packed=False"),
        (byte_lm(I=ALONE_IN_A_ROW.mixers["I"]), r"model\.stack\.mixers\['I'\]\.packed=False"),
        (
            byte_lm(H=replace(ALONE_IN_A_ROW.mixers["H"], packed=True, segment_alignment=128)),
            r"model\.stack\.mixers\['H'\]\.segment_alignment=128 promises that documents start at multiples of 128, "
            r"but with data\.packing='first_fit' and data\.alignment=8 they do at multiples of 8: leave",
        ),
        (blt(16), r"model\.latent\.mixers\['H'\]\.segment_alignment=16 .* they do at multiples of 12: leave"),
        (
            {"entropy_model": ByteLMConfig(stack=ALONE_IN_A_ROW)},
            r"entropy_model\.stack\.mixers\['H'\]\.packed=False",
        ),
    ],
    ids=["hyena", "attention", "extra", "bytes", "slots", "entropy"],
)
def test_promises_that_packed_rows_do_not_keep_are_refused(parts, said):
    with pytest.raises(ValueError, match=said):
        tiny_recipe(**parts, data={"packing": "first_fit", "alignment": 8})
    assert tiny_recipe(**parts).data.alignment == 1


def test_promises_that_packed_rows_keep_are_taken():
    recipe = tiny_recipe(**blt(12), data={"packing": "first_fit", "alignment": 8})
    assert recipe == tiny_recipe(**blt(1), data={"packing": "first_fit", "alignment": 16})


@pytest.mark.parametrize(
    ("data", "patcher", "said"),
    [
        (
            {"seq_len": 48},
            32,
            r"seq_len = 48 is no multiple of that: set patcher\.block_size to 16 or a divisor",
        ),
        (
            {"seq_len": 64, "alignment": 24},
            32,
            r"data\.seq_len = 64 is no multiple of data\.alignment = 96, at multiples of which documents start",
        ),
        (
            {"seq_len": 48, "alignment": 32},
            None,
            r"data\.seq_len = 48 is no multiple of data\.alignment = 32",
        ),
    ],
)
def test_rows_that_blocks_do_not_fill_are_refused(data, patcher, said):
    patcher = None if patcher is None else PatcherConfig(mode="static", block_size=patcher)
    recipe = tiny_recipe(patcher=patcher)
    recipe = replace(recipe, data=replace(recipe.data, packing="sequential", **data))
    with pytest.raises(ValueError, match=said):
        open_data(recipe, make_mesh(devices=jax.devices()[:1]), source=BytesSource([b"abc"]))


@pytest.mark.parametrize("packing", ["windows", "first_fit"])
def test_a_run_that_stored_promises_is_read_and_goes_on(tmp_path, packing):
    """Older versions stored `packed=False`, whatever the rows held."""
    recipe = packed_as("patches", {"packing": packing})
    write_resolved(tmp_path, Resolved(recipe, {}))
    file = tmp_path / "config.json"
    old = file.read_text().replace('"packed": true', '"packed": false')
    old = json.dumps(json.loads(old.replace('"segment_alignment": 1,', '"segment_alignment": 128,')))
    assert old.count('"packed": false') > 5
    file.write_text(old.replace('"alignment": 16', '"alignment": 1'))
    assert not differences(recipe, read_resolved(tmp_path).recipe)
    assert adopt(recipe, read_resolved(tmp_path)) == recipe
    if packing == "windows":
        assert recipe_from_json(to_json(recipe).replace('"packed": true', '"packed": false')) == recipe
