"""Answers of several devices are those of one: rows over `data`, bytes over `seq`, parameters over the other axes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxblt.answers.reading import make_reader, read
from jaxblt.data.sources import BytesSource
from jaxblt.models import StackConfig
from jaxblt.parallel import MeshConfig, make_mesh
from jaxblt.training.start.placement import Placement, find_mesh
from tests.answers.runs import (
    BYTES,
    HEADS,
    LONG,
    ROWS,
    SEQ_LEN,
    SHORT,
    make_run,
    markov_run,
    random_probabilities,
)
from tests.tolerances import assert_close

MESH = MeshConfig(data=1, fsdp=2, seq=2, tensor=2)
RECORDS = [*SHORT, *LONG]


def assert_equal_scores(run, records, mesh):
    one, several = (run.score(records, per_byte=True, batch_size=ROWS, mesh=m) for m in (None, mesh))
    assert_close(np.concatenate(several.per_byte), np.concatenate(one.per_byte), np.float32, n=1024)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_mesh")
def test_a_byte_model_scores_alike(runs):
    """Records of one row and of several, and rows whose number is no multiple of the devices."""
    run, found = runs["bytes"], []
    for rows, mesh in ((ROWS, None), (ROWS - 1, MESH)):
        found.append(np.concatenate(run.score(RECORDS, per_byte=True, batch_size=rows, mesh=mesh).per_byte))
    assert_close(found[1], found[0], np.float32, n=1024)


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_model_embeds_alike(runs):
    one, several = (runs["bytes"].embed(RECORDS, batch_size=ROWS, mesh=mesh) for mesh in (None, MESH))
    assert_close(np.stack(several.arrays), np.stack(one.arrays), np.float32, n=1024)


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_patched_model_scores_alike(runs):
    """Its rows are longer than asked for: each device holds whole blocks, and the entropy model what came before."""
    assert_equal_scores(runs["patches"], LONG, MeshConfig(seq=8))


@pytest.mark.slow(days=28, group="decoding")
def test_states_of_a_zigzag_layout_are_in_order():
    attention = dataclasses.replace(HEADS, layout="zigzag")
    stack = StackConfig(dim=16, num_layers=1, pattern="A", mlp_dim=0, mixers={"A": attention})
    run, mesh = make_run(dataclasses.replace(BYTES, stack=stack)), MeshConfig(seq=4)
    assert_equal_scores(run, SHORT, mesh)
    every, last = (run.embed(SHORT, pool=pool, batch_size=ROWS, mesh=mesh) for pool in ("per_byte", "last"))
    assert_close(np.stack(last.arrays), np.stack([states[-1] for states in every.arrays]), np.float32, n=16)


def test_the_mesh_in_force_is_taken(tmp_path):
    run = markov_run(random_probabilities())
    (tmp_path / "g.fa").write_text(">one\nGATTACAGAT\n")
    (tmp_path / "v.vcf").write_text("one\t5\t.\tA\tG\n")
    expected = run.score(RECORDS).log_likelihood
    effect = run.variants(tmp_path / "v.vcf", tmp_path / "g.fa").score
    with jax.set_mesh(make_mesh(data=2, seq=2, devices=jax.devices()[:4])):
        assert_close(run.score(RECORDS).log_likelihood, expected, np.float32, n=1024)
        assert_close(run.variants(tmp_path / "v.vcf", tmp_path / "g.fa").score, effect, np.float32, n=64)


def test_no_device_holds_a_whole_row_or_all_parameters(runs):
    reader = make_reader(runs["bytes"], window=100, batch_size=3, mesh=MESH)
    assert reader.batch_size == 4
    spans, batch = next(read(reader, BytesSource([b"A" * 99]), np.array([100])))
    assert len(spans) == 1
    placed = reader.placement.batch(batch)
    assert placed.inputs.shape == (4, 100)
    assert {shard.data.shape for shard in placed.inputs.addressable_shards} == {(2, 50)}
    split = [x for x in jax.tree.leaves(reader.params) if not x.sharding.is_fully_replicated]
    assert sum(x.size for x in split) > 0.9 * sum(x.size for x in jax.tree.leaves(reader.params))


def test_rows_and_lengths_divide_among_the_devices():
    place = Placement(find_mesh(MeshConfig(data=2, seq=4)), block=16)
    assert [place.rows(n) for n in (1, 2, 7)] == [2, 2, 8]
    assert [place.length(n) for n in (1, 64, SEQ_LEN + 1)] == [64, 64, 128]
    assert Placement().length(7) == Placement().rows(7) == 7


def test_meshes_of_other_axes_are_named():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="the mesh has axes x, expected data, fsdp, seq, tensor"):
        markov_run(random_probabilities()).score([b"A"], mesh=mesh)
    with pytest.raises(ValueError, match="there are 8 devices"):
        markov_run(random_probabilities()).score([b"A"], mesh=MeshConfig(data=1, seq=3))
