"""The table of implementations: which entry is taken, and what is said of the others."""

from threading import Thread
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import (
    Device,
    Implementation,
    choose,
    compiling_for,
    current_device,
    explain,
    explain_call,
    has_reference_ops,
    record_choices,
    reference_ops,
)

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


def test_what_would_rather_not_run_does_when_asked_for() -> None:
    slow = Implementation("triton", lambda size: size * 2, rather_not=lambda device, size: f"{size} is slow")
    table = (slow, *TABLE)
    assert choose("double", table, None, GPU, 4).name == "cudnn"
    assert choose("double", table, "triton", GPU, 4).name == "triton"
    assert explain("double", table, GPU, 4) == "double: cudnn on NVIDIA H200 (not triton: 4 is slow)"


def test_current_device_is_the_one_jax_compiles_for():
    device = jax.devices()[0]
    assert current_device().platform == device.platform
    assert (current_device().capability is None) == (device.platform != "gpu")


def stand_in(platform: str, capability: str | None = None) -> Any:
    """A JAX device that this machine need not have."""
    own = {} if capability is None else {"compute_capability": capability}
    return SimpleNamespace(platform=platform, device_kind=f"a {platform}", **own)


def test_the_default_device_comes_before_the_first_one(monkeypatch):
    with jax.default_device("cpu"):
        assert current_device().platform == "cpu"
    config = SimpleNamespace(jax_default_device=stand_in("gpu", "8.6"))
    found = SimpleNamespace(config=config, devices=lambda: [stand_in("cpu")])
    monkeypatch.setattr(_dispatch, "jax", found)
    assert current_device() == Device("gpu", (8, 6), "a gpu")
    config.jax_default_device = None
    assert current_device() == Device("cpu", None, "a cpu")


def test_ops_choose_for_the_device_that_is_compiled_for_and_after_it_for_this_one():
    here = current_device()
    with compiling_for(GPU):
        assert current_device() == GPU
        with compiling_for(stand_in("tpu")):
            assert current_device() == Device("tpu", None, "a tpu")
        assert current_device() == GPU
    with pytest.raises(KeyError), compiling_for(GPU):
        raise KeyError
    assert current_device() == here


def test_what_was_traced_for_one_device_is_traced_anew_for_another():
    capability = jax.jit(lambda x: x + (current_device().capability or (0, 0))[0])
    traced = [capability.trace(1.0).jaxpr]
    for device in (GPU, Device("gpu", (12, 0), "a newer GPU")):
        with compiling_for(device):
            traced.append(capability.trace(1.0).jaxpr)
    assert len(set(map(str, traced))) == 3


def test_lengths_that_are_left_open_are_for_the_reference_alone_and_rows_for_no_kernel():
    rows, length = jax.export.symbolic_shape("b, t")
    entries = [Implementation(name, print) for name in ("mosaic_gpu_vjp", "xla", "reference")]
    too_long = "it is compiled for one length, and the size t is symbolic"
    for shape, reasons in {
        (rows, 4): ["it is compiled for one number of rows, and the size b is symbolic", None, None],
        (4, length): [too_long, too_long, None],
        (4, 4, length): [too_long, too_long, None],
    }.items():
        array = jax.ShapeDtypeStruct(shape, "float32")
        assert [entry.cannot_run(CPU, array) for entry in entries] == reasons


def double(x: Any) -> Any:
    return choose("double", TABLE, None, current_device(), x.shape[0]).run(x)


def test_a_call_is_explained_for_a_device_and_runs_after_it():
    x = jax.ShapeDtypeStruct((3,), "float32")
    assert explain_call(double, GPU, x) == explain("double", TABLE, GPU, 3)
    assert explain_call(double, None, x) == explain("double", TABLE, current_device(), 3)
    assert double(jnp.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(AssertionError, match="stand_in made no choice"):
        explain_call(stand_in, GPU, "cpu")


def test_every_entry_that_is_passed_over_has_its_reason():
    table = (Implementation("mosaic_gpu", print, lambda device, size: "no wgmma"), *TABLE)
    assert explain("double", table, GPU, 3) == (
        "double: xla on NVIDIA H200 (not mosaic_gpu: no wgmma; not cudnn: size 3 is odd)"
    )


def test_choices_are_recorded_in_order_without_repeats():
    with record_choices() as lines:
        for size in (4, 3, 4):
            choose("double", TABLE, None, GPU, size)
        choose("double", TABLE, "xla", GPU, 4)
    choose("double", TABLE, None, CPU, 4)
    assert lines == [
        explain("double", TABLE, GPU, 4),
        explain("double", TABLE, GPU, 3),
        "double: xla on NVIDIA H200 (asked for)",
    ]


def test_recorders_nest_and_end_with_their_block():
    with record_choices() as outer:
        with record_choices() as inner:
            choose("first", TABLE, None, CPU, 4)
        choose("second", TABLE, None, CPU, 4)
    assert [line.split(":")[0] for line in inner] == ["first"]
    assert [line.split(":")[0] for line in outer] == ["first", "second"]


def test_a_recorder_hears_of_no_choice_that_was_refused_and_ends_with_the_error():
    with record_choices() as outer:
        with pytest.raises(ValueError, match="unknown"), record_choices() as inner:
            choose("double", TABLE, "triton", CPU, 4)
        choose("double", TABLE, None, CPU, 4)
    assert inner == []
    assert len(outer) == 1


def test_a_recorder_does_not_hear_other_threads():
    with record_choices() as lines:
        thread = Thread(target=choose, args=("double", TABLE, None, CPU, 4))
        thread.start()
        thread.join()
    assert lines == []


def test_choices_are_made_when_a_program_is_traced():
    run = jax.jit(lambda x: choose("double", TABLE, None, CPU, 4).run(x))
    with record_choices() as first:
        run(1.0)
    with record_choices() as second:
        run(1.0)
    assert len(first) == 1
    assert second == []


def test_reference_ops_take_the_reference_unless_another_is_named():
    table = (*TABLE, Implementation("reference", lambda size: size + size))
    with reference_ops():
        assert choose("double", table, None, GPU, 4).name == "reference"
        assert choose("double", table, "xla", GPU, 4).name == "xla"
        assert explain("double", table, GPU, 4) == "double: reference on NVIDIA H200 (asked for)"
    assert choose("double", table, None, GPU, 4).name == "cudnn"


def test_reference_ops_end_with_their_block_and_stay_in_their_thread():
    seen = []
    with reference_ops():
        with reference_ops():
            pass
        assert has_reference_ops()
        thread = Thread(target=lambda: seen.append(has_reference_ops()))
        thread.start()
        thread.join()
    assert seen == [False]
    with pytest.raises(KeyError), reference_ops():
        raise KeyError
    assert not has_reference_ops()


def test_a_jitted_function_is_traced_again_inside_reference_ops_and_keeps_both():
    traced = []

    @jax.jit
    def f(x):
        traced.append(has_reference_ops())
        return x

    for _ in range(2):
        f(1.0)
        with reference_ops():
            f(1.0)
    assert traced == [False, True]
