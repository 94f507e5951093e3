"""An engine whose weights are split over devices draws what one device draws."""

import re
from dataclasses import replace

import jax
import pytest

from jaxblt.inference.engine import Engine, programs
from jaxblt.parallel import make_mesh
from jaxblt.training.start.placement import place_params
from tests.inference.engine.test_engine import CONFIG, REQUESTS


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_mesh")
def test_weights_are_split_and_bytes_are_those_of_one_device(runs):
    with Engine(runs["transformer"], CONFIG) as engine:
        alone = [stream.read().data for stream in map(engine.submit, REQUESTS)]
    run, mesh = runs["transformer"], make_mesh(tensor=2, devices=jax.devices()[:2])
    params, frozen = place_params(run.recipe, run.params, run.frozen, mesh)
    engine = Engine(replace(run, params=params, frozen=frozen), CONFIG, mesh=mesh)
    split = [leaf for leaf in jax.tree.leaves(engine._params) if not leaf.sharding.is_fully_replicated]
    assert split
    engine.warm()
    calls = (programs._read, programs._decode)
    compiled = [call._cache_size() for call in calls]
    with engine:
        assert [stream.read().data for stream in map(engine.submit, REQUESTS)] == alone
        again = [engine.submit(request) for request in reversed(REQUESTS)]
        assert [stream.read().data for stream in again] == alone[::-1]
    assert [call._cache_size() for call in calls] == compiled


def test_other_axes_are_refused(runs):
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=re.escape("an engine splits weights only, use tensor=2 alone")):
        Engine(runs["transformer"], CONFIG, mesh=mesh)
