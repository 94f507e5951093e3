"""Runs in object stores: trained, interrupted, continued and loaded there as in a local folder."""

import fcntl
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import pytest

import jaxblt
from jaxblt.cli.find_recipe import find_recipe
from jaxblt.remote import download
from jaxblt.training.loop import fit
from jaxblt.training.stored import remote_run
from jaxblt.training.stored.checkpoint import list_steps
from jaxblt.training.stored.remote_run import holds_run, trained_in
from jaxblt.training.stored.resolved import read_resolved
from tests.remote.conftest import Store, store
from tests.training.test_loop import losses
from tests.training.tiny import Letters, tiny_recipe

__all__ = ["store"]
URL = "s3://bucket/runs/a"
RECIPE = tiny_recipe(mesh={"data": 1}, steps=12, eval_every=4, checkpoint_every=4, keep=2, keep_best=1)


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder of temporary folders, and below it an empty working folder."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "temporary"


def train(run_dir, **options):
    return fit(RECIPE, run_dir, devices=jax.devices()[:1], **{"source": Letters()} | options)


def stop_at(read: int) -> Letters:
    return Letters(lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == read else None)


def finished_steps(objects: dict[str, bytes], folder: str = "bucket/runs/a/checkpoints/") -> set[int]:
    names = [name.removeprefix(folder).split("/") for name in objects if name.startswith(folder)]
    return {int(step) for step, *rest in names if rest == ["files.json"]}


@pytest.mark.slow(days=28, group="whole runs")
def test_a_run_goes_on_in_an_object_store(
    store: Store, temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "local")
    first = train(URL, source=stop_at(60))
    assert 0 < first.step < 12
    assert not first.finished
    assert max(finished_steps(store.objects)) == first.step
    assert train(URL).finished
    assert f"finished at step 12; next: jaxblt evaluate {URL}\n" in capsys.readouterr().out
    download(f"{URL}/metrics.jsonl", tmp_path / "metrics.jsonl")
    assert losses(tmp_path) == losses(tmp_path / "local")
    assert finished_steps(store.objects) == set(list_steps(tmp_path / "local" / "checkpoints"))
    check_order(store.log)
    assert not any(name.endswith((".lock", ".partial")) or "-tmp" in name for name in store.log)
    check_readers(store, whole.state.params)
    assert not list(temporary.iterdir())
    assert not list(Path.cwd().iterdir())


def check_order(log: list[str]) -> None:
    """The config is there before a checkpoint, and the list of a step's files behind all of them."""
    names = [name.removeprefix("bucket/runs/a/") for name in log]
    assert names[0] == "config.json"
    lists = [i for i, name in enumerate(names) if name.endswith("/files.json")]
    assert len(lists) >= 3
    for i in lists:
        step = names[i].removesuffix("files.json")
        assert sum(name.startswith(step) for name in names[:i]) > 3
        assert names[i + 1 :].count(names[i]) == sum(name.startswith(step) for name in names[i + 1 :])


def check_readers(store: Store, params) -> None:
    for url in (URL, URL.replace("s3", "gs")):
        run = jaxblt.load(url)
        assert run.step == 12
        chex.assert_trees_all_equal(run.params, params)
    steps = sorted(finished_steps(store.objects))
    assert jaxblt.load(URL, step=steps[0]).step == steps[0]
    assert jaxblt.load(URL, step="best").step in steps
    with pytest.raises(FileNotFoundError, match=f"no checkpoint of step 7 in {URL}; there are \\[.*12\\]"):
        jaxblt.load(URL, step=7)
    with pytest.raises(
        FileNotFoundError, match=r"s3://bucket/b holds no run: s3://bucket/b/config\.json does not"
    ):
        jaxblt.load("s3://bucket/b")
    assert holds_run(URL)
    assert not holds_run("s3://bucket/b")
    assert find_recipe(URL) == find_recipe(f"{URL}/config.json") == read_resolved(URL).recipe
    recipe = tiny_recipe(mesh={"data": 1}, steps=12, init_from=URL)
    begun = loop_begin(recipe)
    chex.assert_trees_all_equal(begun, params)
    del store.objects["bucket/runs/a/checkpoints/12/files.json"]
    assert jaxblt.load(URL).step == steps[-2]
    store.objects["bucket/runs/a/config.json"] = b"[]"
    with pytest.raises(ValueError, match=f"{URL}/config.json is not the config of a run"):
        jaxblt.load(URL)


def loop_begin(recipe):
    """The parameters that a run begins with."""
    from jaxblt.training.start.initial_params import take

    mesh = recipe.mesh.build(jax.devices()[:1])
    with jax.set_mesh(mesh):
        return take(recipe, mesh).params


def test_an_upload_that_fails_keeps_the_files(store: Store, temporary: Path, monkeypatch) -> None:
    def fail(file: Path, url: str) -> None:
        raise OSError("no way out")

    monkeypatch.setattr(remote_run, "upload", fail)
    with (
        pytest.raises(
            OSError, match=f"{URL} lacks the latest files: no way out; they are in {temporary}"
        ) as caught,
        trained_in(URL) as folder,
    ):
        (folder / "config.json").write_text("{}")
    [kept] = temporary.glob("jaxblt-kept-*")
    assert str(kept) in str(caught.value)
    assert (kept / "config.json").exists()
    with pytest.raises(RuntimeError, match="of training"), trained_in(URL):
        raise RuntimeError("of training")


def test_what_is_uploaded_and_removed(store: Store, temporary: Path, monkeypatch) -> None:
    """Also between the beginning and the end; half-written steps stay here."""
    monkeypatch.setattr(remote_run, "UPLOAD_EVERY_S", 0.02)
    with trained_in(URL) as folder:
        for name in (
            "config.json",
            "checkpoints/4/a",
            "checkpoints/4/files.json",
            "checkpoints/8.orbax-tmp/a",
            "x.lock",
        ):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
        while len(store.objects) < 3:
            pass
        (folder / "checkpoints/4/a").unlink()
    assert sorted(store.objects) == ["bucket/runs/a/checkpoints/4/files.json", "bucket/runs/a/config.json"]
    with trained_in(URL) as folder:
        assert (folder / "config.json").read_text() == "config.json"
        assert not (folder / "x.lock").exists()
    assert len(store.log) == 3


class KilledError(BaseException):
    """What nothing catches."""


@pytest.fixture
def bucket(monkeypatch) -> SimpleNamespace:
    """Objects by their names in the run, and how many uploads and removals there are before a kill."""
    bucket = SimpleNamespace(objects={}, calls_left=1000)

    def count_call() -> None:
        if bucket.calls_left == 0:
            raise KilledError
        bucket.calls_left -= 1

    def put(file: Path, url: str) -> None:
        count_call()
        bucket.objects[url.removeprefix(f"{URL}/")] = file.read_bytes()

    def drop(url: str) -> None:
        count_call()
        bucket.objects.pop(url.removeprefix(f"{URL}/"), None)

    def get(url: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bucket.objects[url.removeprefix(f"{URL}/")])

    def listed(url: str) -> dict[str, remote_run.RemoteFile]:
        return {name: remote_run.RemoteFile(f"{url}/{name}", 1, "") for name in bucket.objects}

    for name, call in (("upload", put), ("remove", drop), ("download", get), ("list_files", listed)):
        monkeypatch.setattr(remote_run, name, call)
    return bucket


def grow(folder: Path, steps: range) -> None:
    """What a run of these steps writes: a line a step, and a checkpoint each second step, of which two are kept."""
    (folder / "tensorboard").mkdir(exist_ok=True)
    for step in steps:
        for log in ("metrics.jsonl", "tensorboard/events"):
            with open(folder / log, "a") as lines:
                lines.write(f"{step}\n")
        if step % 2 == 0:
            for name in ("state", "files.json"):
                (folder / f"checkpoints/{step}").mkdir(parents=True, exist_ok=True)
                (folder / f"checkpoints/{step}/{name}").write_text(str(step))
            shutil.rmtree(folder / f"checkpoints/{step - 4}", ignore_errors=True)


def test_a_kill_at_any_upload_loses_no_line_of_the_log(bucket: SimpleNamespace, tmp_path: Path) -> None:
    """A run that goes on from a checkpoint never logs again what led to it."""
    for number in count():
        bucket.objects.clear()
        folder, resumed = tmp_path / f"{number}", tmp_path / f"{number}.resumed"
        mirror, bucket.calls_left = remote_run.Mirror(URL, folder), 1000
        folder.mkdir()
        (folder / "config.json").write_text("first")
        grow(folder, range(1, 5))
        mirror.push()
        (folder / "configs").mkdir()
        (folder / "config.json").rename(folder / "configs/000_until_step_4.json")
        (folder / "config.json").write_text("second")
        grow(folder, range(5, 11))
        bucket.calls_left = number
        with suppress(KilledError):
            mirror.push()
            break
        remote_run.Mirror(URL, resumed).fetch()
        step = max(int(file.parent.name) for file in resumed.rglob("checkpoints/*/files.json"))
        assert (resumed / f"checkpoints/{step}/state").read_text() == str(step)
        for log in ((resumed / "metrics.jsonl").read_bytes(), bucket.objects["tensorboard/events"]):
            assert set(range(1, step + 1)) <= {int(line) for line in log.split()}
        if (resumed / "config.json").read_text() == "second":
            assert (resumed / "configs/000_until_step_4.json").read_text() == "first"
    assert number > 10


def test_copies_that_killed_processes_left_are_removed(
    bucket: SimpleNamespace, temporary: Path, monkeypatch
) -> None:
    """Not one that is in use, that is being made, or that holds what was never uploaded."""
    for name in ("run-old", "run-young", "kept-old", "run-used"):
        (temporary / f"jaxblt-{name}").mkdir()
        (temporary / f"jaxblt-{name}" / "metrics.jsonl").touch()
        if name != "run-young":
            os.utime(temporary / f"jaxblt-{name}", (0, 0))
    used = os.open(temporary / "jaxblt-run-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    with trained_in(URL) as folder:
        names = {path.name.removeprefix("jaxblt-") for path in temporary.iterdir()} - {folder.name[7:]}
        assert names == {"run-young", "kept-old", "run-used"}
        monkeypatch.setattr(remote_run, "YOUNG_S", -1)
        with trained_in(URL):
            assert folder.exists()
            assert not (temporary / "jaxblt-run-young").exists()
    os.close(used)


@pytest.mark.parametrize("name", ["checkpoints/1/../../../b", "/b"])
def test_names_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Object stores allow any name."""
    file = remote_run.RemoteFile(f"s3://bucket/runs/a/{name}", 1, "")
    with pytest.raises(ValueError, match=r"s3://bucket/runs/a/.* leads out of its folder: remove it"):
        remote_run._fetch({name: file}, [name], tmp_path)


@pytest.mark.parametrize("mark", ["?", "#"])
def test_names_that_object_stores_cut_are_refused(mark: str) -> None:
    with pytest.raises(ValueError, match="is no part of a file's name"), trained_in(f"{URL}{mark}b"):
        pass


def test_several_processes_need_a_folder_that_all_see(monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with (
        pytest.raises(ValueError, match=f"run_dir='{URL}' is remote, and 4 processes train"),
        trained_in(URL),
    ):
        pass


def test_a_run_without_a_folder_s_name_is_refused() -> None:
    """An unset variable of a shell would spread a run over the folder that it was started in."""
    with pytest.raises(ValueError, match=r"run_dir is '' .*: name a folder"), trained_in(""):
        pass
