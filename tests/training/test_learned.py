"""A run with learned boundaries: calibrated at step 0, stored, read back, and ended if its rate strays."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxblt
from jaxblt.cli.main import main
from jaxblt.data.sources import BytesSource
from jaxblt.mixers import AttentionConfig, GatedRecurrenceConfig
from jaxblt.models import BLTConfig, LevelConfig, StackConfig
from jaxblt.patching import PatcherConfig, calibrate_cut
from jaxblt.patching.learned import BoundaryConfig
from jaxblt.training import trainer
from jaxblt.training.log.health import TrainingFailed, check_health
from jaxblt.training.loop import fit
from jaxblt.training.optimisers.adamw import AdamWConfig
from jaxblt.training.start.setup import open_data, to_devices
from jaxblt.training.start.timed_step import prepare
from jaxblt.training.state import TrainState
from tests.training.tiny import Letters, tiny_recipe

TARGET = 3.0
CUT = PatcherConfig(mode="learned", block_size=8)


def recipe(router: BoundaryConfig, **options):
    window = AttentionConfig(dim=16, num_heads=2, window=8)
    local = StackConfig(dim=16, num_layers=1, pattern=("w",), mlp_dim=0, mixers={"w": window}, scan=False)
    mixers = {"r": GatedRecurrenceConfig(dim=16)}
    latent = StackConfig(dim=16, num_layers=2, pattern=("r",), mlp_dim=0, mixers=mixers, remat="full")
    model = BLTConfig(
        encoder=local,
        latent=latent,
        decoder=local,
        hash=None,
        bridge_heads=2,
        features_enter="output",
        router=router,
        tie_head=False,
    )
    patcher = PatcherConfig(mode="learned", block_size=16)
    return tiny_recipe(model=model, patcher=patcher, bytes_per_patch=TARGET, max_overflow=1.0, **options)


@pytest.mark.filterwarnings("ignore::jaxblt.patching.overflow.PatchOverflowWarning")
@pytest.mark.slow(days=28, group="long")
def test_a_run_is_calibrated_trained_split_read_back_and_drawn(tmp_path, capsys) -> None:
    """In micro-batches over split parameters: figures, losses and gradients are those of one device and one batch."""
    router = BoundaryConfig(strategy="adaptive_hybrid", motifs=("GT",), learned_motifs=2, motif_length=3)
    source, logged = Letters(), []
    for name, options in (("one", {}), ("split", {"mesh": {"data": 2, "fsdp": 2}, "accumulate": 2})):
        own = recipe(router, steps=6, log_every=1, eval_every=0, **options)
        done = fit(own, tmp_path / name, source=source, devices=jax.devices()[: 4 if options else 1])
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logged.append([json.loads(line) for line in lines if "router/cut_rate" in line])
        assert done.recipe.patcher.target == TARGET
        assert done.recipe.patcher.capacity == 8
    first, split = (lines[0] for lines in logged)
    assert first["router/cut_rate"] == pytest.approx(1 / TARGET, abs=0.06)
    assert first["router/grad_norm"] > 0
    assert 0 <= first["router/flip_rate"] <= first["router/undecided"]
    for name in ("router/cut_rate", "router/mean_p", "bits_per_byte", "sown_loss", "router/grad_norm"):
        assert split[name] == pytest.approx(first[name], rel=1e-3)
    run = jaxblt.load(tmp_path / "one")
    assert run.recipe.model.router == router
    begun = np.asarray(run.params["router"]["theta"])
    assert begun.shape == (1,)
    assert begun != 0
    (tmp_path / "text.txt").write_bytes(source.read(0, 0, 95))
    words = ["patch", str(tmp_path / "text.txt"), "--run-dir", str(tmp_path / "one")]
    main([*words, "--plot", str(tmp_path / "p.png")])
    told = capsys.readouterr().out
    assert "p: mean 0." in told
    assert "patcher: learned" in told
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    for options, message in (
        (["--mode", "entropy"], "mode 'entropy' reads entropies, and the run cuts patches by a router"),
        (["--entropies-out", str(tmp_path / "e.npy")], "--entropies-out needs an entropy model"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*words, *options])


@pytest.mark.filterwarnings("ignore::jaxblt.patching.overflow.PatchOverflowWarning")
@pytest.mark.slow(days=28, group="runs of learned boundaries")
def test_a_run_of_two_levels_is_calibrated_trained_and_read_back(tmp_path) -> None:
    own = recipe(BoundaryConfig(), steps=6, log_every=1, eval_every=0)
    level = LevelConfig(encoder=own.model.encoder, decoder=own.model.decoder, slots_per_group=2.0)
    own = replace(own, model=replace(own.model, level=level))
    fit(own, tmp_path, source=Letters(), devices=jax.devices()[:1])
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first = next(json.loads(line) for line in lines if "level/router/cut_rate" in line)
    assert first["router/cut_rate"] == pytest.approx(1 / TARGET, abs=0.06)
    assert first["level/router/cut_rate"] == pytest.approx(1 / 2, abs=0.25)
    assert jaxblt.load(tmp_path).recipe.model == own.model


@pytest.mark.filterwarnings("ignore::jaxblt.patching.overflow.PatchOverflowWarning")
@pytest.mark.slow(days=28, group="runs of learned boundaries")
def test_held_out_patches_have_the_length_that_is_asked_for(tmp_path) -> None:
    """Within 3 % after training, whose own rate is elsewhere, and after a calibration for another length."""
    words = np.random.default_rng(0).integers(0, 26, (64, 6)) + ord("a")
    lengths = np.random.default_rng(1).integers(2, 7, 64)
    order = np.random.default_rng(2).integers(0, 64, 20_000)
    text = b" ".join(words[i, : lengths[i]].astype(np.uint8).tobytes() for i in order)
    source = BytesSource([text])
    slow = AdamWConfig(learning_rate=2e-3, warmup_steps=20, decay_steps=40)
    own = recipe(BoundaryConfig(), steps=20, eval_every=0, log_every=10, optimizer=slow)
    own = replace(own, patcher=replace(own.patcher, block_size=32))
    fit(own, tmp_path, source=source, devices=jax.devices()[:1])
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rate = [json.loads(line)["router/cut_rate"] for line in lines if "router/cut_rate" in line][-1]
    assert abs(rate * TARGET - 1) > 0.1
    run = jaxblt.load(tmp_path)
    for length, done in ((TARGET, run), (4.5, run.recalibrate(source=source, bytes_per_patch=4.5))):
        found = done.evaluate("validation", source=source)
        assert found["bytes_per_patch"] == pytest.approx(length, rel=0.03), rate
        assert (done.recipe.bytes_per_patch, done.patcher.target) == (length, length)


def test_a_router_without_a_threshold_loses_no_run(monkeypatch) -> None:
    """It scores all bytes alike after the last step."""
    said: list[str] = []
    own = SimpleNamespace(
        setup=SimpleNamespace(recipe=recipe(BoundaryConfig()), mesh=None),
        data=None,
        journal=SimpleNamespace(progress=SimpleNamespace(say=said.append)),
    )
    state = TrainState(step=0, params={}, opt_state=(), skipped=0, skipped_in_a_row=0)
    monkeypatch.setattr(
        trainer, "with_target_length", lambda *_, **__: calibrate_cut(np.ones(8), 3.0, config=CUT)
    )
    assert trainer.Trainer.settle(own, state) is state
    assert "keep the length that they have: all scores of the sample are 1" in said[0]


@pytest.mark.slow(days=28, group="runs of learned boundaries")
def test_routers_that_cut_everywhere_come_back() -> None:
    """Of both levels, planted where every p is above 0.99: half of all boundaries find no room, and few do later."""
    slow = AdamWConfig(learning_rate=5e-3, warmup_steps=20)
    own = recipe(BoundaryConfig(), steps=250, eval_every=0, optimizer=slow)
    level = LevelConfig(encoder=own.model.encoder, decoder=own.model.decoder, slots_per_group=2.0)
    own = replace(own, model=replace(own.model, level=level))

    curve, mesh = [], own.mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        data, ready = open_data(own, mesh, source=Letters()), prepare(own, mesh, Letters())
        state, program = ready.state, ready.step()
        for router in (state.params["router"], state.params["level"]["router"]):
            router["theta"] -= 5 * np.exp(router["log_tau"])
        for step in range(own.train.steps):
            state, found = program(state, to_devices(data.batch(step), mesh, own.data.batch_size))
            curve.append(
                {name: float(found[name]) for name in ("overflow", "level/overflow", "router/cut_rate")}
            )
    curve = curve[9::10]
    for name in ("overflow", "level/overflow"):
        refused = np.array([entry[name] for entry in curve])
        assert refused[0] == pytest.approx(0.5, abs=0.02)
        assert refused[-5:].mean() < 0.25
    rate = np.mean([entry["router/cut_rate"] for entry in curve[-5:]])
    assert rate == pytest.approx(1 / TARGET, rel=0.5)


def test_a_rate_that_strays_ends_the_run_with_the_figure() -> None:
    own = recipe(BoundaryConfig())
    figures = {"skipped_in_a_row": 0.0, "router/cut_rate": 0.01}
    check_health(figures, own.optimizer.warmup_steps, own)
    check_health(figures | {"router/cut_rate": 0.3}, 100, own)
    with pytest.raises(
        TrainingFailed, match=r"at step 100 the router ends patches at 1.00% .* asks for 33.33%"
    ):
        check_health(figures, 100, own)


def test_what_a_recipe_lacks_is_named() -> None:
    own = recipe(BoundaryConfig())
    assert (own.patcher.target, own.patcher.reads_entropies) == (TARGET, False)
    with pytest.raises(
        ValueError, match="patcher mode 'learned' is led to a mean length, and bytes_per_patch is None"
    ):
        replace(own, bytes_per_patch=None)
    with pytest.raises(ValueError, match=r"target must be > 1, got 1.0 \(bytes_per_patch of the recipe\)"):
        replace(own, bytes_per_patch=1.0)
    with pytest.raises(ValueError, match="patcher mode 'learned' needs entropies: set entropy_run"):
        replace(own, model=replace(own.model, router=BoundaryConfig(strategy="entropy_based")))
    with pytest.raises(ValueError, match=r"patcher mode 'learned' and model\.router None do not fit"):
        replace(own, model=replace(own.model, router=None))
