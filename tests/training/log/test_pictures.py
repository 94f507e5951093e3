"""The picture of entropies and patches in the run log."""

import builtins
import importlib.util

import jax
import numpy as np
import pytest

from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig
from jaxblt.training.log import pictures as picture
from jaxblt.training.log.pictures import draw_confusion, first_passage
from jaxblt.training.loop import fit
from jaxblt.training.start.setup import make_setup, open_data
from tests.training.log.test_runlog import events
from tests.training.tiny import Letters, TinyConfig, patched_recipe, tiny_recipe


@pytest.fixture(scope="module")
def entropy_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), steps=6, eval_every=0), run_dir, source=Letters())
    return str(run_dir)


@pytest.mark.slow(days=28, group="whole runs", turn="a picture")
def test_the_event_file_holds_one_picture(entropy_run, tmp_path):
    recipe = patched_recipe(entropy_run, steps=8, eval_every=4)
    fitted = fit(recipe, tmp_path, source=Letters())
    (logged,) = events(tmp_path).Images("eval/patches")
    assert logged.step == 4
    assert logged.encoded_image_string.startswith(b"\x89PNG\r\n\x1a\n")
    with jax.set_mesh(mesh := make_mesh()):
        setup = make_setup(fitted.recipe, mesh, fitted.state.frozen)
        data = open_data(fitted.recipe, mesh, split="validation", mode="eval", source=Letters())
        passage = first_passage(setup, fitted.state.frozen, data)
    assert passage.png() == logged.encoded_image_string
    np.testing.assert_array_equal(passage.ids, data.batch(0).inputs[0])
    above = passage.entropies > fitted.recipe.patcher.threshold
    closed = np.asarray(passage.patches.closed).ravel()
    edges = (np.arange(len(closed)) % 16 == 15) | (np.arange(len(closed)) == 0)
    np.testing.assert_array_equal(closed, above | edges)


@pytest.mark.slow(days=28, group="whole runs", turn="a picture")
def test_without_matplotlib_one_line_says_what_to_install(entropy_run, tmp_path, monkeypatch, capsys):
    found, imported = importlib.util.find_spec, builtins.__import__

    def missing(name, *args, **options):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return imported(name, *args, **options)

    monkeypatch.setattr(picture, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    monkeypatch.setattr(builtins, "__import__", missing)
    assert fit(patched_recipe(entropy_run, steps=8, eval_every=4), tmp_path, source=Letters()).finished
    assert capsys.readouterr().out.count("matplotlib is missing (pip install 'jaxblt[plot]')") == 1
    assert not events(tmp_path).Tags()["images"]


def test_patches_that_no_entropies_cut_are_not_drawn():
    recipe = tiny_recipe(patcher=PatcherConfig(mode="static", patch_size=4, block_size=16))
    with jax.set_mesh(mesh := make_mesh()):
        data = open_data(recipe, mesh, split="validation", mode="eval", source=Letters())
        assert first_passage(make_setup(recipe, mesh), {}, data) is None


def test_names_of_classes_are_no_formulas():
    assert draw_confusion(np.eye(2), (r"$\bad{$", "b"))[:4] == b"\x89PNG"
