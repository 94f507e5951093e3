"""Beam searches of an engine run in programs that `warm` compiled."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxblt.inference import beam_search
from jaxblt.inference.engine import Engine, EngineConfig, Lane
from tests.inference.engine.test_engine import CONFIG, LONG


def count_compiled(call):
    """The result of a call, and how many programs were compiled meanwhile."""
    found = []

    def note(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        return call(), len(found)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/searches")
def test_searches_of_any_number_of_beams_and_any_prompt_compile_nothing(runs):
    run, config = runs["transformer"], replace(CONFIG, beams=3)
    engine = Engine(run, config)
    engine.warm()
    engine.search(b"a", max_new_bytes=1, beams=1)
    asked = [(b"once", 2, 9), (LONG, 3, 40), (b"", 1, 33)]
    options = {"alphabet": b"abc ", "length_exponent": 1.0}

    def search():
        return [
            engine.search(prompt, beams=beams, max_new_bytes=new, **options) for prompt, beams, new in asked
        ]

    searched, compiled = count_compiled(search)
    assert compiled == 0
    assert [len(found) for found in searched] == [2, 3, 1]
    expected = beam_search(run.decoder, run.decoder_params, b"once", beams=2, max_new_bytes=9, **options)
    assert [beam.data for beam in searched[0]] == [beam.data for beam in expected]
    nats = [[beam.log_likelihood for beam in beams] for beams in (searched[0], expected)]
    np.testing.assert_allclose(*nats, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_new_bytes": None}, "max_new_bytes must be a whole number, got None"),
        ({"max_new_bytes": 0}, "max_new_bytes must be at least 1, got 0"),
        ({"max_new_bytes": 1, "beams": "2"}, "beams must be a whole number, got '2'"),
        ({"max_new_bytes": 1, "length_exponent": 11}, "length_exponent must lie in 0..10, got 11"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_before_rows_are_chosen(runs, options, said):
    engine = Engine(runs["transformer"], replace(CONFIG, beams=3))
    with pytest.raises(ValueError, match=re.escape(said)):
        engine.search(b"a", **options)


def test_rows_of_a_search_are_of_the_smallest_lane_that_they_do_not_exceed():
    lanes = (Lane(slots=8, capacity=1024), Lane(slots=1, capacity=4096))
    assert EngineConfig(lanes, beams=8).search_lanes == (0,)
    assert EngineConfig(lanes, beams=2).search_lanes == (0, 1)
    assert EngineConfig(lanes).search_lanes == ()
