import dataclasses
import json
import os
import re
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxblt
from jaxblt.data import BytesSource
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig, PatchOverflowWarning
from jaxblt.training.log.health import TrainingFailed
from jaxblt.training.log.runlog import read_metrics
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start import step_ahead
from jaxblt.training.start.begin import begin, check_same_data
from jaxblt.training.start.setup import make_setup, open_data, recipe_step
from jaxblt.training.state import content_hash, without_frozen
from jaxblt.training.stored.checkpoint import Checkpointer, list_steps
from jaxblt.training.stored.resolved import read_resolved
from tests.test_show import check_short
from tests.training.tiny import Letters, TinyConfig, patched_recipe, tiny_recipe

TIMES = {"seconds", "bytes_per_second", "data_wait", "mfu", "peak_memory_bytes"}


def logged(run_dir):
    """Log lines without what depends on the clock."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def losses(run_dir):
    return {line["step"]: line["loss"] for line in logged(run_dir) if "loss" in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 8 devices, from start to end."""
    run_dir = tmp_path_factory.mktemp("run")
    return fit(tiny_recipe(), run_dir, source=Letters()), run_dir


def test_a_run_learns_and_leaves_its_record(run):
    fitted, run_dir = run
    assert fitted.finished
    assert fitted.step == int(fitted.state.step) == 24
    lines = logged(run_dir)
    assert [line["step"] for line in lines if "loss" in line] == list(range(2, 25, 2))
    assert [line["step"] for line in lines if "validation/loss" in line] == [12, 24]
    assert (
        lines[-1]["validation/bits_per_byte"]
        == fitted.validation["bits_per_byte"]
        < 4
        < lines[0]["bits_per_byte"]
    )
    assert next(read_metrics(run_dir / "metrics.jsonl"))["bytes_per_second"] > 0
    assert sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir()) == [20, 24]
    config = json.loads((run_dir / "config.json").read_text())
    assert config["versions"]["jax"] == jax.__version__
    assert read_resolved(run_dir).recipe == fitted.recipe == tiny_recipe()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_left_as_it_is(run, capsys):
    """Also if it is asked to log more."""
    fitted, run_dir = run
    before = contents(run_dir)
    again = fit(tiny_recipe(log_every=1), run_dir, source=Letters())
    assert again.finished
    assert again.step == 24
    assert capsys.readouterr().out == f"{run_dir} is finished: it is at step 24 of 24; nothing was changed\n"
    jax.tree.map(np.testing.assert_array_equal, again.state.params, fitted.state.params)
    assert contents(run_dir) == before


def test_other_settings_are_refused_by_name_and_change_nothing(run):
    before = contents(run[1])
    optimizer = AdamWConfig(learning_rate=2e-2, warmup_steps=4)
    other = tiny_recipe(optimizer=optimizer, data={"seed": 1}, steps=30, seed=2)
    with pytest.raises(ValueError, match=r"holds a run with other settings.*--resume-with") as caught:
        fit(other, run[1], source=Letters())
    for change in (
        "optimizer.learning_rate: 0.01 -> 0.02",
        "data.seed: 0 -> 1",
        "train.steps: 24 -> 30",
        "train.seed: 0 -> 2",
    ):
        assert change in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ValueError, match=r"at step 24 already: raise train.steps = 24.*learning_rate: 0.01 -> 0.02"
    ):
        fit(tiny_recipe(optimizer=optimizer), run[1], source=Letters(), resume_with=True)
    assert contents(run[1]) == before


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_report_before_step_0_and_checkpoints_by_the_clock(tmp_path, capsys):
    recipe = tiny_recipe(steps=5, eval_every=0, checkpoint_every=100, checkpoint_every_s=1e-9, keep=9)
    fit(recipe, tmp_path, source=Letters())
    assert list_steps(tmp_path / "checkpoints") == [1, 2, 3, 4, 5]
    said = capsys.readouterr().out
    for words in (
        "parameters      ",
        "without hash tables",
        "FLOPs per byte",
        "a parameter",
        "8 x cpu",
        "up/kernel",
    ):
        assert words in said
    assert said.index("up/kernel") < said.index("train 2/5")


@pytest.mark.slow(days=28, group="whole runs")
@pytest.mark.parametrize(
    ("mesh", "count", "options"),
    [
        ({"data": 1}, 1, {}),
        ({"data": 2, "fsdp": 4}, 8, {}),
        ({"data": 1, "fsdp": 2}, 2, {"accumulate": 4}),
    ],
)
def test_mesh_and_micro_batches_do_not_change_the_loss(mesh, count, options, run, tmp_path):
    recipe = tiny_recipe(mesh=mesh, **options)
    fitted = fit(recipe, tmp_path, source=Letters(), devices=jax.devices()[:count])
    expected, found = losses(run[1]), losses(tmp_path)
    assert expected.keys() == found.keys()
    # 24 steps of Adam carry rounding errors on
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)
    kernel = fitted.state.params["up"]["kernel"]
    assert len({s.index for s in kernel.addressable_shards}) == mesh.get("fsdp", 1)


@pytest.mark.slow(days=28, group="whole runs")
def test_sigterm_saves_and_the_next_fit_goes_on(run, tmp_path):
    """The run goes on with another mesh."""

    def terminate(count):
        if count == 8 * 12:
            os.kill(os.getpid(), signal.SIGTERM)

    fitted = fit(tiny_recipe(), tmp_path, source=Letters(terminate))
    assert not fitted.finished
    assert 0 < fitted.step < 24
    assert (tmp_path / "checkpoints" / str(fitted.step)).exists()
    fitted = fit(tiny_recipe(mesh={"data": 4}), tmp_path, source=Letters(), devices=jax.devices()[:4])
    assert fitted.finished
    expected, found = losses(run[1]), losses(tmp_path)
    assert expected.keys() == found.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_two_steps_at_most_are_in_flight_and_a_signal_waits_for_no_others(nameless, tmp_path, monkeypatch):
    """Nothing is logged, so nothing else waits for them.

    The user has no name, the folder that of a sweep, and checkpoints are linked to another disk.
    """
    begun, awaited, wait = [], [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: awaited.append(id(tree)) or wait(tree))

    def watched(setup):
        step = recipe_step(setup)

        def begin_step(state, batch):
            assert all(id(metrics) in awaited for metrics in begun[:-1])
            if len(begun) == 6:
                os.kill(os.getpid(), signal.SIGTERM)
            state, metrics = step(state, batch)
            begun.append(metrics)
            return state, metrics

        begin_step.trace, begin_step.lower = step.trace, step.lower
        return begin_step

    monkeypatch.setattr(step_ahead, "recipe_step", watched)
    run_dir, scratch = tmp_path / "lr=[1e-3]", tmp_path / "scratch*"
    run_dir.mkdir()
    scratch.mkdir()
    (run_dir / "checkpoints").symlink_to(scratch)
    recipe = tiny_recipe(log_every=1000, eval_every=0, checkpoint_every=1000)
    fitted = fit(recipe, run_dir, source=Letters())
    assert (fitted.step, len(begun), fitted.finished) == (7, 7, False)
    assert list_steps(scratch) == [7]
    assert jaxblt.load(run_dir).step == 7


def test_time_limit_saves_and_ends_and_other_data_are_refused(tmp_path, capsys):
    fitted = fit(tiny_recipe(time_limit_s=1e-3), tmp_path, source=Letters())
    assert not fitted.finished
    assert (tmp_path / "checkpoints" / str(fitted.step)).exists()
    with pytest.raises(ValueError, match="has no best step: it was trained without evaluations"):
        jaxblt.load(tmp_path, step="best")
    said = capsys.readouterr()
    assert re.search(
        r"train\.time_limit_s = 0\.001 counts all \d+ s of the run: raise it", said.err + said.out
    )
    before, more = contents(tmp_path), BytesSource([*Letters().documents, b"ACGT" * 100])
    with pytest.raises(
        ValueError, match=r"held 103 rows of 3277 bytes, and holds 113 rows of 3597 bytes; put"
    ):
        fit(tiny_recipe(time_limit_s=1e-3), tmp_path, source=more)
    flipped = BytesSource([Letters().documents[0][::-1]])
    with pytest.raises(
        ValueError, match=r"have changed: blocks that were sampled hold other bytes, at the same"
    ):
        fit(tiny_recipe(time_limit_s=1e-3), tmp_path, source=flipped)
    assert contents(tmp_path) == before
    data = open_data(tiny_recipe(), make_mesh(), source=flipped)
    for noted in ({}, {"data": {"rows": 103, "bytes": 3277}}):  # by earlier versions
        check_same_data(noted, data, "run")
    assert fit(tiny_recipe(time_limit_s=1e-3), tmp_path, source=more, resume_with=True).step > fitted.step


def test_another_model_in_the_same_folder_is_refused(run):
    with pytest.raises(ValueError, match=r"model\.dim: 16 -> 8"):
        fit(tiny_recipe(model=TinyConfig(dim=8)), run[1], source=Letters())


def test_checkpoints_without_their_config_are_refused(run, tmp_path):
    shutil.copytree(run[1] / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(
        FileNotFoundError, match=r"holds checkpoints but no config\.json.*delete the folder.*run_dir"
    ):
        fit(tiny_recipe(), tmp_path, source=Letters())
    assert list_steps(tmp_path / "checkpoints") == [20, 24]


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_a_run_begins_where_process_0_says(run):
    """Not where this process sees its checkpoints: another may have looked before they had their names."""
    recipe, mesh = tiny_recipe(), make_mesh()

    class Before(Checkpointer):
        def steps(self):
            return []

    with jax.set_mesh(mesh), Before(run[1] / "checkpoints") as checkpoints:
        data = open_data(recipe, mesh, source=Letters())
        assert begin(recipe, run[1], data, mesh, checkpoints)[2] == 0
    with jax.set_mesh(mesh), Checkpointer(run[1] / "checkpoints") as checkpoints:
        assert begin(recipe, run[1], data, mesh, checkpoints)[2] == 24


@pytest.mark.slow(days=28, group="costly")
def test_init_from_takes_parameters_alone(run, tmp_path):
    recipe = tiny_recipe(
        init_from=str(run[1]), steps=6, eval_every=0, optimizer=AdamWConfig(1e-3, warmup_steps=1)
    )
    fitted = fit(recipe, tmp_path, source=Letters())
    assert fitted.step == 6
    first = logged(tmp_path)[0]
    assert first["step"] == 2
    assert first["bits_per_byte"] < logged(run[1])[0]["bits_per_byte"] - 2


@pytest.mark.slow(days=28, group="costly")
def test_steps_that_are_not_finite_end_the_run(tmp_path):
    optimizer = AdamWConfig(learning_rate=1e38, warmup_steps=0, clip_norm=None)
    with pytest.raises(TrainingFailed, match=r"steps 2-4 were not finite in loss, gradient or update"):
        fit(tiny_recipe(optimizer=optimizer, max_skips=3), tmp_path, source=Letters())


def poisoned(*steps):
    """The train step of a recipe, whose loss is infinite at these steps, the first of which is 1."""

    def poisoned_step(setup):
        step = recipe_step(setup)
        is_bad = jnp.zeros(100, bool).at[jnp.asarray(steps) - 1].set(True)

        def poison(state, batch):
            weight = jnp.where(is_bad[state.step], jnp.float32(jnp.inf), jnp.float32(1))
            return step(state, batch.replace(loss_mask=batch.loss_mask.astype(jnp.float32) * weight))

        return jax.jit(poison)

    return poisoned_step


@pytest.mark.slow(days=28, group="costly")
def test_a_burst_of_bad_steps_is_named_and_not_saved(tmp_path, monkeypatch, capsys):
    """Step 10 is not saved before step 12, and the last one without the count that would end the next run."""
    recipe = tiny_recipe(steps=14, eval_every=0, keep=9)
    monkeypatch.setattr(step_ahead, "recipe_step", poisoned(9, 10, 11, 14))
    fitted = fit(recipe, tmp_path, source=Letters())
    assert int(fitted.state.skipped) == 4
    assert list_steps(tmp_path / "checkpoints") == [5, 12, 14]
    named = [line for line in logged(tmp_path) if "skipped_steps" in line]
    assert [(line["step"], line["skipped_steps"]) for line in named] == [
        (10, [9, 10]),
        (12, [11]),
        (14, [14]),
    ]
    assert "not finite in loss, gradient or update, and skipped: steps 9-10\n" in capsys.readouterr().out
    mesh = make_mesh()
    with jax.set_mesh(mesh), Checkpointer(tmp_path / "checkpoints") as checkpoints:
        data = open_data(recipe, mesh, source=Letters())
        setup = begin(recipe, tmp_path, data, mesh, checkpoints)[0]
        stored = checkpoints.restore(without_frozen(setup.abstract)).state
        assert (int(stored["skipped"]), int(stored["skipped_in_a_row"])) == (4, 0)
        # as earlier versions stored it
        earlier = stored | {"skipped_in_a_row": stored["skipped_in_a_row"] + 5, "frozen": None}
        checkpoints.save(16, earlier, {"seconds": 1.0})
        _, state, step, _ = begin(recipe, tmp_path, data, mesh, checkpoints)
        assert (step, int(state.skipped), int(state.skipped_in_a_row)) == (16, 4, 0)


@pytest.mark.slow(days=28, group="costly")
def test_too_few_slots_end_the_run(tmp_path):
    patcher = PatcherConfig(mode="static", patch_size=2, block_size=16, capacity=4)
    with pytest.raises(TrainingFailed, match="found no slot"):
        fit(tiny_recipe(patcher=patcher), tmp_path, source=Letters())


@pytest.mark.slow(days=28, group="costly")
def test_profiler_traces_on_request(tmp_path):
    fit(tiny_recipe(steps=5, eval_every=0, profile_steps=(2, 3)), tmp_path, source=Letters())
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


@pytest.fixture(scope="module")
def patched_runs(tmp_path_factory):
    """An entropy model, then a model on its patches; the entropy run's folder is gone afterwards."""
    folder = tmp_path_factory.mktemp("entropy")
    fit(tiny_recipe(model=TinyConfig(dim=8), eval_every=0), folder / "entropy", source=Letters())
    recipe = patched_recipe(str(folder / "entropy"), checkpoint_every=10)
    shorter = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=20))
    fitted = fit(shorter, folder / "blt", source=Letters())
    shutil.rmtree(folder / "entropy")
    as_before_frozen_trees_had_folders(fitted, folder / "blt", folder / "old")
    return recipe, fitted, folder / "blt"


def as_before_frozen_trees_had_folders(fitted, run_dir, old_dir):
    """The same run at the same step: the step holds the entropy model and the threshold, config.json one hash."""
    entropy = fitted.state.frozen["entropy"]
    inside = {"params": entropy.params, "threshold": jnp.float32(fitted.recipe.patcher.threshold)}
    with Checkpointer(old_dir / "checkpoints") as checkpoints:
        checkpoints.save(20, without_frozen(fitted.state) | {"frozen": inside}, {"seconds": 1.0})
    config = json.loads((run_dir / "config.json").read_text())
    assert config.pop("frozen") == {"entropy": entropy.content_hash}
    (old_dir / "config.json").write_text(json.dumps(config | {"frozen_hash": entropy.content_hash}))


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_what_fit_and_load_return_is_shown_in_a_few_lines(patched_runs):
    """And all that it holds: a notebook prints its last line."""
    _, fitted, run_dir = patched_runs
    assert re.fullmatch(
        r"Fitted 'tiny' at step 20 of 20\n  model       TinyConfig, 23,936 trained parameters\n"
        r"  validation  bits_per_byte \d.*, bytes_per_patch \S+",
        repr(fitted),
    )
    run, setup = jaxblt.load(run_dir), make_setup(fitted.recipe, make_mesh(), fitted.state.frozen)
    for made in (fitted, run, run.state, setup):
        check_short(made)


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_threshold_and_capacity_are_calibrated(patched_runs):
    _, fitted, run_dir = patched_runs
    patcher = fitted.recipe.patcher
    assert patcher.threshold is not None
    assert patcher.margin > 0
    assert patcher.entropy_context == 32, "what the entropy model was trained on"
    assert patcher.capacity % 8 == 0
    assert abs(fitted.validation["bytes_per_patch"] - 3.0) < 0.6
    assert fitted.recipe.entropy_model == TinyConfig(dim=8)
    assert read_resolved(run_dir).recipe == fitted.recipe


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_the_entropy_model_is_stored_once_by_its_hash(patched_runs):
    _, fitted, run_dir = patched_runs
    (tree,) = (run_dir / "frozen").iterdir()
    assert read_resolved(run_dir).frozen == {"entropy": tree.name}
    assert content_hash(fitted.state.frozen["entropy"].params) == tree.name
    for step in (run_dir / "checkpoints").iterdir():
        held = json.loads((step / "meta" / "data.json").read_text())["fingerprint"]
        changing = {"step", "params", "opt_state", "skipped", "skipped_in_a_row"}
        assert {name.split("/")[0] for name in held} == changing


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_resumes_and_loads_without_the_entropy_run(patched_runs):
    recipe, before, run_dir = patched_runs
    stored = {file: file.stat().st_mtime_ns for file in (run_dir / "frozen").rglob("*")}
    fitted = fit(recipe, run_dir, source=Letters(), resume_with=True)
    assert fitted.step == 24
    assert {file: file.stat().st_mtime_ns for file in (run_dir / "frozen").rglob("*")} == stored
    assert read_resolved(run_dir).recipe.train.steps == 24
    earlier = json.loads((run_dir / "configs" / "000_until_step_20.json").read_text())
    assert earlier["recipe"]["train"]["steps"] == 20
    assert fitted.recipe.patcher == before.recipe.patcher
    jax.tree.map(np.testing.assert_array_equal, fitted.state.frozen, before.state.frozen)
    run = jaxblt.load(run_dir)
    assert (run.step, run.patcher, run.threshold) == (
        24,
        before.recipe.patcher,
        before.recipe.patcher.threshold,
    )
    assert run.recipe == fitted.recipe
    assert run.vocabulary.decode(run.vocabulary.encode(b"ACGT")) == b"ACGT"
    jax.tree.map(np.testing.assert_array_equal, run.params, fitted.state.params)
    jax.tree.map(np.testing.assert_array_equal, run.frozen, fitted.state.frozen)
    found = run.evaluate("validation", source=Letters(), targets="AC")
    np.testing.assert_allclose(found["bits_per_byte"], fitted.validation["bits_per_byte"], rtol=1e-5)
    assert 0 < found["target_bytes"] < found["bytes"]


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_a_run_whose_steps_hold_the_entropy_model_loads_and_goes_on_to_the_same_bits(patched_runs):
    recipe, before, run_dir = patched_runs
    old = run_dir.parent / "old"
    run = jaxblt.load(old)
    jax.tree.map(np.testing.assert_array_equal, run.frozen, before.state.frozen)
    assert (run.step, run.recipe) == (20, before.recipe)
    fitted = fit(recipe, old, source=Letters(), resume_with=True)
    newer = jaxblt.load(run_dir)  # went on in the test before
    assert (fitted.step, newer.step) == (24, 24)
    jax.tree.map(np.testing.assert_array_equal, fitted.state.params, newer.params)
    assert read_resolved(old).frozen == read_resolved(run_dir).frozen
    for step in (20, 24):  # one holds the entropy model, the other does not
        jax.tree.map(np.testing.assert_array_equal, jaxblt.load(old, step=step).frozen, before.state.frozen)


@pytest.mark.slow(days=28, group="costly", turn="training/test_loop")
def test_a_run_is_calibrated_anew_for_other_data(patched_runs):
    """Letters in an order that the entropy model has not seen ask for more boundaries than a block has slots."""
    _, _, run_dir = patched_runs
    run = jaxblt.load(run_dir)
    other = BytesSource([np.random.default_rng(1).integers(0, 256, 2048).astype(np.uint8).tobytes()])
    few = small(run.patcher)
    recipe = dataclasses.replace(run.recipe, patcher=few)
    tight = dataclasses.replace(run, recipe=recipe, task=run.task.cut_by(few))
    with pytest.warns(
        PatchOverflowWarning, match=r"[\d,]+ of [\d,]+ patch boundaries \([\d.]+%\) were refused"
    ):
        found = tight.evaluate("all", source=other)
    assert found["overflow"] > 0.1
    assert found["refused"] > 0
    ample = tight.recalibrate(source=other, split="all")
    assert ample.patcher == dataclasses.replace(run.patcher, capacity=ample.patcher.capacity)
    assert ample.evaluate("all", source=other)["refused"] == 0
    longer = run.recalibrate(source=other, split="all", bytes_per_patch=5.0)
    assert longer.threshold != run.threshold
    assert longer.task.patcher.threshold == longer.threshold
    assert abs(longer.evaluate("all", source=other)["bytes_per_patch"] - 5.0) < 0.3
    with pytest.raises(ValueError, match="out of reach"):
        run.recalibrate(source=other, split="all", bytes_per_patch=99.0)


def small(patcher):
    """With slots for half of the patches."""
    return dataclasses.replace(patcher, capacity=2)


def test_load_of_no_run_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        jaxblt.load(tmp_path)
