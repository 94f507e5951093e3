import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from jaxblt.parallel import (
    DistributedError,
    batch_sharding,
    init_distributed,
    local_rows,
    make_global,
    make_mesh,
)
from jaxblt.parallel.distributed import first_exchange
from jaxblt.training.state import content_hash
from jaxblt.training.stored.checkpoint import Checkpointer, list_steps, restore
from jaxblt.training.stored.frozen_store import frozen_dir
from tests.parallel.processes import ROOT, free_port, run_processes, worker_env
from tests.parallel.worker import BATCH, LENGTH, through_mixers, whole_batch


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(count, marks=pytest.mark.slow(days=28, group="processes of their own", turn=f"{count}"))
        for count in (2, 4)
    ],
)
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("processes")
    w = jax.device_put(np.arange(64, dtype=np.float32).reshape(16, 4), batch_sharding(make_mesh()))
    with Checkpointer(folder / "from_one") as one:
        one.save(5, {"w": w}, {"note": 0.1})
    outputs = run_processes("tests.parallel.worker", str(folder), count=request.param, devices=2)
    lines = [next(line for line in out.splitlines() if line.startswith("REPORT ")) for out in outputs]
    return [json.loads(line.removeprefix("REPORT ")) for line in lines], folder


@pytest.mark.parametrize("layout", ["by_rows", "by_sequence"])
def test_each_process_brings_its_rows_and_all_sum_alike(reports: Any, layout: str) -> None:
    found = [report[layout] for report in reports[0]]
    covered = np.zeros((BATCH, LENGTH), bool)
    for part in found:
        assert part["shape"] == [BATCH, LENGTH]
        assert part["total"] == int((whole_batch() ** 2).sum())
        for index, data in part["shards"].items():
            where = eval(index)
            covered[where] = True
            np.testing.assert_array_equal(whole_batch()[where], data)
    assert covered.all()


def test_a_sequence_over_all_processes_is_mixed_as_on_one_device(reports: Any) -> None:
    expected = through_mixers(None)
    for report in reports[0]:
        for name, values in expected.items():
            np.testing.assert_allclose(report["mixers"][name], values, rtol=1e-5, err_msg=name)


def test_the_table_names_every_process(reports: Any) -> None:
    for rank, report in enumerate(reports[0]):
        rows = report["table"].splitlines()[1:]
        assert [int(row.split()[0]) for row in rows] == list(range(len(reports[0])))
        assert all("2 x cpu" in row for row in rows)
        assert [row.endswith("(this one)") for row in rows].index(True) == rank


def test_processes_agree_on_the_step_to_stop_at(reports: Any) -> None:
    assert [report["stops"] for report in reports[0]] == [[4, 5, 6, 7]] * len(reports[0])


def test_checkpoints_cross_process_counts(reports: Any) -> None:
    found, folder = reports
    weighted = float((np.arange(64, dtype=np.float64) ** 2).sum())
    hashed = content_hash({"w": np.arange(64, dtype=np.float32).reshape(16, 4)})
    expected = {"read": weighted, "meta": {"note": 0.1}, "step": 5, "fallen": 7, "hash": hashed}
    for report in found:
        assert report["checkpoints"] == expected
    assert list_steps(frozen_dir(folder, hashed)) == [0]
    back = restore(folder / "from_many", {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32)})
    assert back.meta == {"by": len(found)}
    np.testing.assert_array_equal(back.state["w"], np.arange(64, dtype=np.float32).reshape(16, 4))


@pytest.mark.slow(days=28, group="costly")
def test_a_process_that_waits_in_vain_says_so() -> None:
    script = (
        "from jaxblt.parallel import init_distributed\n"
        f"init_distributed(coordinator='127.0.0.1:{free_port()}', num_processes=2, process_id=1, timeout_s=2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=worker_env(1),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "DistributedError: process 1 of 2" in done.stderr
    assert "within 2 s: are all processes started" in done.stderr


def test_an_error_of_the_start_is_not_called_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a backend that was started before; the others wait, and say so."""

    def refuse(**options: Any) -> None:
        raise RuntimeError("initialize() must be called before\nany JAX calls")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(
        DistributedError,
        match=r"^process 1 of 2 .* could not join at a:1: initialize.* any JAX calls$",
    ):
        init_distributed(coordinator="a:1", num_processes=2, process_id=1)


def test_an_exchange_that_hangs_says_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: released.wait(60))
    with pytest.raises(
        DistributedError, match=r"among 1 processes failed \(no answer within 0.1 s\).*process 0"
    ):
        first_exchange(timeout_s=0.1)
    released.set()


def test_one_process_needs_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXBLT_NUM_PROCESSES", "1")
    assert init_distributed() is None


def test_global_arrays_of_any_rank_on_one_process() -> None:
    sharding = batch_sharding(make_mesh(data=2, fsdp=2, seq=2))
    local = {"x": whole_batch(), "length": np.arange(BATCH, dtype=np.int32), "absent": None}
    out = make_global(local, sharding, batch_size=BATCH)
    assert out["absent"] is None
    assert out["x"].sharding.spec == P(("data", "fsdp"), "seq")
    assert out["length"].sharding.spec == P(("data", "fsdp"))
    np.testing.assert_array_equal(out["x"], whole_batch())
    np.testing.assert_array_equal(out["length"], np.arange(BATCH))
    assert out["x"].addressable_shards[0].data.shape == (BATCH // 4, LENGTH // 2)


def test_rows_that_do_not_fit_are_errors() -> None:
    sharding = batch_sharding(make_mesh(data=2, fsdp=4))
    with pytest.raises(ValueError, match=r"6 rows does not divide among 8 shards.*multiple of 8"):
        local_rows(sharding, 6)
    with pytest.raises(ValueError, match=r"brought 4 rows of a batch of 8.*rows 0 to 7"):
        make_global(whole_batch()[:4], sharding, batch_size=8)
