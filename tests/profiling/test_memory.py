"""Known allocations are read within 10 %."""

import gc
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.profiling import MemoryProfile, memory, profile_memory

MIB = 2**20


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Arrays of earlier tests stay: a collection in between would free them, and one before takes 10 s in a suite."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def wait_for_sample(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that waits until what is held now was sampled, however long that takes."""
    taken, read = threading.Semaphore(0), memory._resident_bytes

    def counted() -> int:
        size = read()
        taken.release()
        return size

    def wait() -> None:
        while taken.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have begun before
            taken.acquire()

    monkeypatch.setattr(memory, "_resident_bytes", counted)
    return wait


def test_device_peak_counts_arrays_that_are_gone_at_the_end(wait_for_sample: Callable[[], None]) -> None:
    with profile_memory() as memory:
        array = jax.block_until_ready(jnp.ones((64 * MIB // 4,), jnp.float32))
        wait_for_sample()
        del array
    assert memory.device_peak - memory.device_before == pytest.approx(64 * MIB, rel=0.1)
    assert memory.device_peak >= memory.device_before


@pytest.mark.usefixtures("no_collection")
def test_sharded_arrays_count_by_the_share_of_one_device() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    with profile_memory() as memory:
        array = jax.block_until_ready(jax.device_put(np.ones((64 * MIB // 4,), np.float32), sharding))
    del array
    assert memory.device_peak - memory.device_before == pytest.approx(8 * MIB, rel=0.1)


@pytest.mark.slow(days=28, group="costly")
def test_host_peak_counts_touched_pages(wait_for_sample: Callable[[], None]) -> None:
    with profile_memory() as memory:
        block = np.ones(256 * MIB // 8)
        wait_for_sample()
        del block
    assert memory.host_peak - memory.host_before == pytest.approx(256 * MIB, rel=0.1)


def test_the_figures_arrive_when_the_block_fails() -> None:
    with pytest.raises(KeyError), profile_memory() as memory:
        raise KeyError("inside")
    assert memory.host_peak > 0


def test_efficiency_is_the_share_of_the_limit() -> None:
    assert MemoryProfile(device_peak=30, device_limit=120).efficiency == 0.25
    assert MemoryProfile(device_peak=30).efficiency is None
    text = str(MemoryProfile(device_peak=2**30, device_limit=2**31, host_peak=2**29))
    assert text == "device 1.000 GiB (50% of the device), host 0.500 GiB"
