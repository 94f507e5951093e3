"""The table of implementations: which entry is taken, and what is said of the others."""

import jax
import pytest

from pallas_kernels._dispatch import Device, Implementation, choose, current_device, explain

CPU = Device("cpu")
GPU = Device("gpu", (9, 0), "NVIDIA H200")


def _needs_gpu(device: Device, size: int) -> str | None:
    if device.platform != "gpu":
        return "no GPU"
    return None if size % 2 == 0 else f"size {size} is odd"


TABLE = (
    Implementation("cudnn", lambda size: 2 * size, _needs_gpu),
    Implementation("xla", lambda size: size + size),
)
NOTHING = (Implementation("cudnn", lambda size: 2 * size, _needs_gpu),)


@pytest.mark.parametrize(("device", "size", "name"), [(GPU, 4, "cudnn"), (GPU, 3, "xla"), (CPU, 4, "xla")])
def test_takes_the_first_that_can_run(device, size, name):
    assert choose("double", TABLE, None, device, size).name == name


def test_takes_the_one_that_is_named():
    assert choose("double", TABLE, "xla", GPU, 4).name == "xla"
    assert choose("double", TABLE, "cudnn", GPU, 4).name == "cudnn"


@pytest.mark.parametrize(
    ("table", "name", "device", "message"),
    [
        (TABLE, "cudnn", CPU, "double: implementation 'cudnn' cannot run here: no GPU"),
        (
            TABLE,
            "triton",
            GPU,
            r"unknown implementation 'triton', expected one of \['cudnn', 'xla'\] or None",
        ),
        (NOTHING, None, CPU, "double: no implementation can run here\ndouble: nothing can run on cpu"),
    ],
)
def test_refuses_with_a_reason(table, name, device, message):
    with pytest.raises(ValueError, match=message):
        choose("double", table, name, device, 4)


@pytest.mark.parametrize(
    ("device", "size", "text"),
    [
        (GPU, 4, "double: cudnn on NVIDIA H200"),
        (GPU, 3, "double: xla on NVIDIA H200 (not cudnn: size 3 is odd)"),
        (CPU, 4, "double: xla on cpu (not cudnn: no GPU)"),
    ],
)
def test_explains(device, size, text):
    assert explain("double", TABLE, device, size) == text


def test_current_device_is_the_one_jax_compiles_for():
    device = jax.devices()[0]
    assert current_device().platform == device.platform
    assert (current_device().capability is None) == (device.platform != "gpu")
