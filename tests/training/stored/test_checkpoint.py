import errno
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxblt.outputs import is_full
from jaxblt.parallel import make_mesh
from jaxblt.training.stored import checkpoint as checkpoint_module
from jaxblt.training.stored import integrity
from jaxblt.training.stored.cadence import SaveCadence
from jaxblt.training.stored.checkpoint import (
    CheckpointCorrupt,
    Checkpointer,
    StateMismatch,
    list_steps,
    restore,
)
from jaxblt.training.stored.integrity import (
    FILE_LIST,
    _sum_on_device,
    _sum_on_host,
    check_fingerprint,
    fingerprint,
    named_leaves,
)
from tests.parameters import abstract_like

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
ROOT = Path(__file__).resolve().parents[3]


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any
    key: Any
    frozen: Any = None


def make_state(step: int = 0) -> State:
    rng = np.random.default_rng(step)
    params = {
        "embed": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
        "block": {
            "w": jnp.asarray(rng.standard_normal((8, 24)), jnp.float32),
            "flag": jnp.array([True, False]),
        },
        "half": jnp.asarray(rng.standard_normal((8,)), jnp.bfloat16),
    }
    key = jax.random.key(step)
    return State(jnp.int32(step), params, OPTIMIZER.init(params), key, {"rate": jnp.zeros((), jnp.float32)})


def on_mesh(mesh: jax.sharding.Mesh, state: Any) -> Any:
    """The state split over all axes of the mesh where dimensions allow."""

    def place(leaf: Any) -> Any:
        fits = leaf.ndim == 2 and leaf.shape[0] % 4 == 0
        return jax.device_put(
            leaf, NamedSharding(mesh, P(mesh.axis_names[1], mesh.axis_names[3]) if fits else P())
        )

    return jax.tree.map(place, state)


def assert_same_bits(got: Any, want: Any) -> None:
    chex.assert_trees_all_equal_structs(got, want)
    for (name, a), b in zip(named_leaves(got).items(), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, name
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


def saved(folder: Path, *steps: int) -> Path:
    with Checkpointer(folder, keep=len(steps) + 2) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step})
    return folder


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("run") / "checkpoints", 10, 20)


@pytest.mark.slow(days=28, group="costly")
def test_round_trip_through_three_meshes(tmp_path: Path) -> None:
    meshes = [
        make_mesh(data=1, fsdp=8),
        make_mesh(data=1, fsdp=2, tensor=4),
        make_mesh(devices=jax.devices()[:1]),
        make_mesh(data=2, fsdp=4),
    ]
    want, held = make_state(3), on_mesh(meshes[0], make_state(3))
    for number, mesh in enumerate(meshes[1:]):
        with Checkpointer(tmp_path / str(number)) as checkpoints:
            checkpoints.save(3, held, {"number": number})
        template = on_mesh(mesh, make_state(0))
        held, meta, step = restore(tmp_path / str(number), abstract_like(template))
        assert (meta, step) == ({"number": number}, 3)
        assert_same_bits(held, want)
        for got, asked in zip(jax.tree.leaves(held), jax.tree.leaves(template), strict=True):
            assert got.sharding == asked.sharding


def test_buffers_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((1024, 1024)), jnp.float32)}
    want = np.array(state["w"])
    overwrite = jax.jit(lambda s: jax.tree.map(lambda w: w * 0 - 7, s), donate_argnums=0)
    overwrite({"w": jnp.ones((1024, 1024))})
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for _ in range(10):
            state = overwrite(state)
        jax.block_until_ready(state)
    np.testing.assert_array_equal(restore(tmp_path, abstract_like(state)).state["w"], want)


def test_old_steps_go_and_periodic_ones_stay(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_period=20) as checkpoints:
        for step in range(10, 70, 10):
            checkpoints.save(step, {"w": jnp.ones(2)})
        checkpoints.wait()
        assert checkpoints.steps() == [20, 40, 50, 60]
        assert checkpoints.latest_step() == 60


def test_saves_leave_no_threads(tmp_path: Path) -> None:
    """Nor their event loops: after some hundred saves no file could be opened any more."""
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.wait()
        before = threading.active_count()
        for step in (2, 3, 4):
            checkpoints.save(step, {"w": jnp.ones(2)})
        checkpoints.wait()
        assert threading.active_count() <= before


def test_meta_keeps_every_bit_of_a_float(tmp_path: Path) -> None:
    meta = {"threshold": float(np.nextafter(1.3, 2)), "name": "é", "list": [1, None, True]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, meta)
        with pytest.raises(ValueError, match="meta must be JSON"):
            checkpoints.save(2, {"w": jnp.ones(2)}, {"bad": object()})
        with pytest.raises(ValueError, match="step 1 is saved already"):
            checkpoints.save(1, {"w": jnp.ones(2)})
    assert restore(tmp_path, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}).meta == meta


def test_numpy_leaves_are_saved_too(tmp_path: Path) -> None:
    state = {"a": np.arange(3), "b": np.float32(0.1)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    back = restore(tmp_path, {"a": np.zeros(3, np.int64), "b": np.zeros((), np.float32)}).state
    np.testing.assert_array_equal(back["a"], state["a"])
    assert back["b"] == state["b"]


def test_nothing_is_pickled(two_steps: Path) -> None:
    for file in two_steps.rglob("*"):
        if file.is_file():
            assert b"\x80\x04\x95" not in file.read_bytes(), f"{file} holds a pickle"


def test_missing_checkpoints_are_named(tmp_path: Path, two_steps: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*nowhere"):
        restore(tmp_path / "nowhere", make_state())
    with pytest.raises(FileNotFoundError, match=r"step 15 .*there are \[10, 20\]"):
        restore(two_steps, abstract_like(make_state()), step=15)
    with Checkpointer(tmp_path / "new") as checkpoints:
        assert checkpoints.latest_step() is None
        with pytest.raises(ValueError, match="keep=1"):
            Checkpointer(tmp_path / "other", keep=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda p: p | {"embed": jnp.zeros((16, 9))},
            ["params/embed: stored shape (16, 8), asked for (16, 9)"],
        ),
        (lambda p: p | {"half": jnp.zeros(8)}, ["params/half: stored dtype bfloat16, asked for float32"]),
        (lambda p: p | {"new": jnp.zeros(8)}, ["params/new: asked for, not stored"]),
        (lambda p: {"embed": p["embed"]}, ["params/half: stored, not asked for", "params/block/w"]),
    ],
)
def test_another_model_is_an_error_and_no_fall_back(two_steps: Path, change: Any, words: list[str]) -> None:
    state = make_state()
    with pytest.raises(StateMismatch) as caught:
        restore(two_steps, abstract_like(state.replace(params=change(state.params))))
    assert all(word in str(caught.value) for word in [*words, "config it was trained with"]), str(
        caught.value
    )


def test_a_part_alone(two_steps: Path) -> None:
    want = make_state(20).params
    template = jax.eval_shape(lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), want))
    split = NamedSharding(make_mesh(data=1, fsdp=8), P("fsdp"))
    template["embed"] = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=split)
    got, meta, step = restore(two_steps, template, subtree="params")
    assert (meta, step) == ({"step": 20}, 20)
    assert got["embed"].sharding == split
    assert_same_bits(got, jax.tree.map(lambda x, t: x.astype(t.dtype), want, template))
    block = restore(two_steps, abstract_like(want["block"]), subtree="params/block", step=10).state
    assert_same_bits(block, make_state(10).params["block"])
    with pytest.raises(StateMismatch, match=r"holds no 'params/blok': at 'blok' there is .*block"):
        restore(two_steps, template, subtree="params/blok")


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "delete":
        file.unlink()
    elif how == "flip":
        data[len(data) // 2] ^= 0x55
        file.write_bytes(data)
    else:
        file.write_bytes(data[: len(data) // 2] if how == "halve" else b"")


# Orbax leaves coroutines behind when a read fails half way.
@pytest.mark.slow(days=28)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("how", ["delete", "empty", "halve", "flip"])
def test_damage_to_any_file_falls_back_or_does_no_harm(
    two_steps: Path, tmp_path: Path, how: str, listed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = [file.relative_to(two_steps) for file in sorted((two_steps / "20").rglob("*")) if file.is_file()]
    template, fell = abstract_like(make_state()), []
    for number, file in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(two_steps, folder)
        if not listed:
            (folder / "20" / FILE_LIST).unlink()
        if not (folder / file).exists():
            continue
        damage(folder / file, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING, checkpoint_module.__name__):
            state, meta, step = restore(folder, template)
        assert_same_bits(state, make_state(step))
        assert meta == {"step": step}
        assert ("fell back to the checkpoint of step 10" in caplog.text) == (step == 10)
        if step == 10:
            fell.append(file)
    parts = [
        file for file in files if file.parts[1] in ("state", "meta") and file.name != "commit_success.txt"
    ]
    vital = [
        file
        for file in parts
        if file.name in ("_METADATA", "data.json") or file.parts[-2:] == ("state", "manifest.ocdbt")
    ]
    assert len(vital) == 3
    assert set(parts if listed else vital) <= set(fell)
    gc.collect(1)


def test_when_nothing_can_be_read_all_reasons_are_listed(two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps, tmp_path / "run")
    for step in ("10", "20"):
        damage(tmp_path / "run" / step / "meta" / "data.json", "halve")
    with pytest.raises(CheckpointCorrupt) as caught:
        restore(tmp_path / "run", abstract_like(make_state()))
    assert "10/meta/data.json changed" in str(caught.value)
    assert "20/meta/data.json changed" in str(caught.value)


def test_steps_that_a_trainer_removes_meanwhile_are_looked_up_again(
    two_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = iter([[4, 8], list_steps(two_steps), []])
    monkeypatch.setattr(checkpoint_module, "list_steps", lambda directory: next(listings))
    assert restore(two_steps, abstract_like(make_state())).step == 20


def test_a_run_that_fell_back_saves_the_lost_step_again(
    two_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    damage(folder / "20" / "state" / "_METADATA", "halve")
    with Checkpointer(folder) as checkpoints:
        assert checkpoints.restore(abstract_like(make_state())).step == 10
        assert f"continuing from step 10: 20 was moved to {folder / '20.aside'}" in caplog.text
        assert checkpoints.steps() == [10]
        checkpoints.save(20, make_state(20), {"step": 20})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20]
        assert_same_bits(checkpoints.restore(abstract_like(make_state())).state, make_state(20))


@pytest.mark.slow(days=28, group="costly")
def test_going_back_on_purpose_leaves_later_steps_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        assert checkpoints.restore(abstract_like(make_state()), step=1).step == 1
        checkpoints.save(2, make_state(2))
    assert list_steps(tmp_path) == [1, 2]
    assert {"2.aside", "3.aside"} <= set(os.listdir(tmp_path))


WRITER = """
import sys, jax, jax.numpy as jnp
from jaxblt.training.stored.checkpoint import Checkpointer
from tests.parameters import abstract_like
state = lambda step: {"w": jnp.full((1024, 1024), step, jnp.float32), "key": jax.random.key(step)}
with Checkpointer(sys.argv[1]) as checkpoints:
    first = 1
    if checkpoints.steps():
        restored = checkpoints.restore(abstract_like(state(0)))
        assert bool((restored.state["w"] == restored.step).all()) and restored.meta == {"step": restored.step}
        first = restored.step + 1
    print("resumed at", first, flush=True)
    for step in range(first, 1000):
        checkpoints.save(step, state(step), {"step": step})
        print("saving", step, flush=True)
"""


@pytest.mark.slow(days=28, group="whole runs")
def test_killed_while_saving_it_resumes_from_a_whole_step(tmp_path: Path) -> None:
    known = 0
    for kill_after in (1, 3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        first = int(writer.stdout.readline().split()[-1])
        # A save returns only after the one before it has ended.
        assert first in (known, known + 1) or known == 0
        for _ in range(kill_after):
            started = int(writer.stdout.readline().split()[-1])
        writer.kill()
        writer.wait()
        writer.stdout.close()
        known = started
        template = {
            "w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
            "key": jax.eval_shape(jax.random.key, 0),
        }
        steps = list_steps(tmp_path)
        assert started - 1 in steps or started == 1
        if steps:
            state, meta, step = restore(tmp_path, template)
            assert step == steps[-1] == meta["step"]
            assert bool((state["w"] == step).all())


def test_fingerprint_is_the_sum_of_words_on_any_mesh() -> None:
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    half = jnp.asarray(x[0], jnp.bfloat16)
    want = {
        "w": int(x.view(np.uint32).astype(np.uint64).sum() % 2**32),
        "half": int(np.asarray(half).view(np.uint16).astype(np.uint64).sum()),
        "flag": 2,
    }
    for mesh in (make_mesh(), make_mesh(data=2, fsdp=2, seq=2)):
        w = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"))))
        tree = {"w": w, "half": half, "flag": jnp.array([True, True, False])}
        assert fingerprint(tree) == want
        check_fingerprint(tree, want)
        with pytest.raises(CheckpointCorrupt, match="half"):
            check_fingerprint(tree, want | {"half": want["half"] + 1})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_host_and_device_sum_the_same_words(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 5)) * 250).astype(dtype)
    assert int(_sum_on_device(x)) == int(_sum_on_host(np.asarray(x)))


def test_remote_directories_are_refused() -> None:
    for url in ("gs://bucket/run/checkpoints", "s3://bucket/run"):
        with pytest.raises(ValueError, match=f"directory='{url}' is remote"):
            Checkpointer(url)
        with pytest.raises(ValueError, match=f"directory='{url}' is remote"):
            list_steps(url)


def test_a_save_that_fails_behind_the_loop_is_an_error_and_no_page_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(integrity, "write_file_list", fail)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, {"w": jnp.ones(2)})
    with pytest.raises(Exception, match="No space left") as caught:
        checkpoints.wait()
    assert is_full(caught.value)
    assert list_steps(tmp_path) == []
    assert [record for record in caplog.records if record.exc_info] == []


def test_the_file_list_is_part_of_every_finished_step(two_steps: Path) -> None:
    for step in ("10", "20"):
        listing = json.loads((two_steps / step / FILE_LIST).read_text())
        assert {"state/_METADATA", "meta/data.json"} <= set(listing)


def test_a_checkpoint_is_due_every_so_many_steps_and_seconds_and_until_it_is_saved() -> None:
    now = [0.0]
    saves = SaveCadence(10, 300.0, clock=lambda: now[0])
    assert not saves.due(9, saves.wanted)
    assert saves.due(10, saves.wanted)
    assert saves.due(11, saves.wanted)
    saves.saved()
    assert not saves.due(12, saves.wanted)
    now[0] = 299.0
    assert not saves.due(13, saves.wanted)
    now[0] = 300.0
    late = saves.wanted
    assert saves.due(14, late)
    saves.saved()
    assert not saves.due(15, saves.wanted)
    assert not saves.due(16, late)  # another process's, a step later
    now[0] = 1e9
    never = SaveCadence(10, None, clock=lambda: now[0])
    assert not never.due(9, never.wanted)
