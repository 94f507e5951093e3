"""GPUs to compile for. What their compiler makes of a program is for `make gpu-compile` to see."""

import importlib.util

import pytest

from jaxblt.profiling.targets import MISSING, devices_of, known_gpus

PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") is not None


def test_the_h200_is_known_and_others_are_errors() -> None:
    assert "h200" in known_gpus()
    with pytest.raises(ValueError, match=r"no GPU 'h900'.*h200"):
        devices_of("h900", 1)


@pytest.mark.parametrize("count", [0, 12])
def test_devices_fill_their_hosts(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} devices do not fill hosts of 8"):
        devices_of("h200", count)


@pytest.mark.skipif(PLUGIN, reason="JAX's CUDA plugin is installed; this is what is said without it")
def test_without_the_plugin_the_error_says_where_to_find_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        devices_of("h200", 1)
    assert str(caught.value) == MISSING
    assert "cuda13" in MISSING
    assert "make plan" in MISSING
