"""Batches of fewer rows where rows are longer, on several devices."""

import jax
import numpy as np
import pytest

from jaxblt.data import BytesSource
from jaxblt.parallel import make_mesh
from jaxblt.training.start.setup import open_data, to_devices
from tests.training.tiny import tiny_recipe

SOURCE = BytesSource([bytes([65 + i]) * (3 + 20 * (i % 2)) for i in range(20)])
DATA = {
    "packing": "buckets",
    "buckets": (8,),
    "max_tokens": 128,
    "split": "documents",
    "fractions": (1.0, 0.0, 0.0),
}


def test_batches_of_every_size_are_spread_over_the_devices():
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    data = open_data(tiny_recipe(data=DATA), mesh, source=SOURCE)
    assert data.batch_sizes == (8, 4)
    shapes = set()
    for step in range(6):
        local = data.batch(step)
        batch = to_devices(local, mesh, data.config.batch_size)
        assert np.array_equal(batch.inputs, local.inputs)
        assert len(batch.inputs.sharding.device_set) == 4
        shapes.add(batch.inputs.shape)
    assert shapes == {(8, 8), (4, 32)}


def test_a_bucket_with_fewer_rows_than_devices_is_refused():
    with pytest.raises(ValueError, match="a batch of 4 rows does not divide among 8 shards"):
        open_data(tiny_recipe(data=DATA), make_mesh(data=8), source=SOURCE)
