import itertools

import jax
import pytest
from jax.sharding import AxisType

from jaxblt.parallel import MeshConfig, make_mesh


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1, 1)),
        ({"data": 1, "seq": -1, "tensor": 2}, (1, 1, 4, 2)),
        ({"data": 1, "fsdp": 2, "seq": 2, "tensor": 2}, (1, 2, 2, 2)),
    ],
)
def test_sizes_fill_the_devices(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    mesh = make_mesh(**sizes)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "seq", "tensor"), shape, strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())


def test_config_builds_the_same_mesh_on_chosen_devices() -> None:
    devices = jax.devices()[:4]
    built = MeshConfig(fsdp=2).build(devices)
    assert built == make_mesh(data=2, fsdp=2, devices=devices)
    assert set(built.devices.flat) == set(devices)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 3}, ["data=3", "multiply to 3", "8 devices"]),
        ({"fsdp": 3}, ["fsdp=3", "divides 8"]),
        ({"data": -1, "seq": -1}, ["data and seq", "-1"]),
        ({"tensor": 0}, ["tensor=0", "at least 1"]),
        ({"data": 16}, ["data=16", "16", "8 devices"]),
    ],
)
def test_wrong_sizes_are_named(sizes: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make_mesh(**sizes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_split_of_8_devices_is_a_mesh() -> None:
    splits = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if s[0] * s[1] * s[2] * s[3] == 8]
    for data, fsdp, seq, tensor in splits:
        assert make_mesh(data=data, fsdp=fsdp, seq=seq, tensor=tensor).devices.shape == (
            data,
            fsdp,
            seq,
            tensor,
        )
