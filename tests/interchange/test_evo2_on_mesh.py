"""An imported Evo 2 lies on a mesh from the start, reads split rows, is planned, and learns by adapters."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.adapters import AdapterConfig, attach
from jaxblt.interchange import read_evo2
from jaxblt.interchange.striped_hyena import entries
from jaxblt.models.striped_hyena import EVO2, striped_hyena
from jaxblt.parallel import MeshConfig
from jaxblt.testing.tolerances import bound, worst
from jaxblt.training.loop import fit
from jaxblt.training.start.compile_ahead import plan_step, settle
from jaxblt.training.start.placement import place_params
from tests.interchange import evo2_weights as weights
from tests.interchange.test_evo2_run import TENSORS, record, save
from tests.interchange.test_striped_hyena import FIXTURE, tiny

LENGTH = 1000


def import_run(folder: Path, pattern: str, tensors: dict[str, np.ndarray]) -> Path:
    """The folder of an imported run of a tiny model."""
    save(folder / "tiny.pt", tensors)
    with pytest.MonkeyPatch.context() as patch:
        table = {**EVO2, "tiny": tiny(pattern)}
        patch.setattr("jaxblt.models.striped_hyena.EVO2", table)
        patch.setattr("jaxblt.interchange.evo2_run.EVO2", table)
        read_evo2(folder / "tiny.pt", folder / "run", config="tiny")
    return folder / "run"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return import_run(tmp_path_factory.mktemp("evo2_on_mesh"), weights.CASES["mixed"], TENSORS)


@pytest.mark.slow(days=28, group="costly")
def test_each_device_reads_its_own_part_of_an_imported_run(run_dir, monkeypatch):
    mesh = MeshConfig(data=1, fsdp=4, tensor=2)
    whole = jaxblt.load(run_dir)
    placed, _ = place_params(whole.recipe, whole.params, {}, mesh.build())
    sent, put = [], jax.device_put

    def counted(x, *args, **options):
        sent.append(getattr(x, "nbytes", 0))
        return put(x, *args, **options)

    monkeypatch.setattr(jax, "device_put", counted)
    run = jaxblt.load(run_dir, mesh=mesh)
    monkeypatch.undo()
    leaves = [jax.tree.leaves(x) for x in (run.params, placed, whole.params)]
    for found, expected, alone in zip(*leaves, strict=True):
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
        np.testing.assert_array_equal(found, alone)
    parts = [x.addressable_shards[0].data.nbytes for x in leaves[0]]
    assert sum(parts) < sum(x.nbytes for x in leaves[2]) / 2
    # What is read and sent to a device is its part, never the whole
    assert max(sent) == max(parts)


@pytest.mark.slow(days=28, group="costly")
def test_rows_that_a_mesh_splits_have_the_references_likelihood(run_dir):
    run = jaxblt.load(run_dir, dtype="float32")
    scores = run.score([record(LENGTH)], mesh=MeshConfig(data=1, seq=4).build(jax.devices()[:4]))
    with np.load(FIXTURE / "mixed.npz") as expected:
        near = bound(np.float32, LENGTH)
        assert worst(scores.log_likelihood[0], expected[f"likely_{LENGTH}"]) < near


@pytest.mark.slow(days=28, group="costly")
def test_an_adapter_is_planned_and_trained_over_an_imported_run(tmp_path):
    """A mesh splits the rows, as those of long contexts."""
    shapes = {name: entry.shape for name, entry in entries(striped_hyena(tiny("MA"))).items()}
    run_dir = import_run(tmp_path, "MA", weights.draw(shapes, 5))
    (tmp_path / "x.fa").write_text(">a\n" + "ACGTTGCATTAGGACC" * 80 + "\n")
    base = jaxblt.load(run_dir)
    data = replace(base.recipe.data, paths=(str(tmp_path / "x.fa"),), seq_len=304, split="position")
    train = replace(base.recipe.train, steps=1, eval_every=0, dtype="float32")
    recipe = replace(
        base.recipe,
        name="adapted",
        model=attach(base.recipe.model, AdapterConfig(rank=2)),
        base_run=str(run_dir),
        data=data,
        train=train,
        optimizer=replace(base.recipe.optimizer, warmup_steps=0),
        mesh=MeshConfig(data=1, seq=2),
    )
    planned, _ = settle(recipe)
    memory = plan_step(planned, recipe.mesh.build(jax.devices()[:2]))
    assert memory.arguments["parameters"] < memory.arguments["base model"]
    fit(recipe, tmp_path / "adapted", devices=jax.devices()[:2])
    run = jaxblt.load(tmp_path / "adapted")
    assert run.step == 1
    before, after = (x.params["stack"]["period_0"]["block_1"]["mixer"]["out"] for x in (base, run))
    np.testing.assert_array_equal(after["kernel"], before["kernel"])
    assert after["adapter"]["u"].any()
