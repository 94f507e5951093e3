"""Lanes get fewer rows where memory is short, and say so."""

from dataclasses import replace

import jax
import pytest

from jaxblt.inference.engine import Engine, Lane, LaneShrunkWarning, programs
from tests.inference.engine.test_engine import CONFIG, INTO_ROWS, REQUESTS


def out_of_memory_above(slots, call):
    """A simulated device: a lane of more rows finds no memory for a call."""

    def simulated(lane, *given):
        if lane.lane.slots > slots:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
        return call(lane, *given)

    return simulated


@pytest.mark.slow(days=28, group="costly")
def test_a_lane_shrinks_until_rows_and_prompts_fit(runs, monkeypatch):
    for name, slots in (("decode", 6), ("read", 3)):
        call = getattr(programs.LanePrograms, name)
        monkeypatch.setattr(programs.LanePrograms, name, out_of_memory_above(slots, call))
    engine = Engine(runs["transformer"], replace(CONFIG, lanes=(Lane(slots=12, capacity=176),)))
    with pytest.warns(LaneShrunkWarning, match="memory is short") as told:
        engine.warm()
    said = ["12 rows of 176 bytes does not fit, it gets 6", "6 rows of 176 bytes does not fit, it gets 3"]
    assert all(part in str(warning.message) for part, warning in zip(said, told, strict=True))
    assert engine.lanes == (Lane(slots=3, capacity=176),)
    with engine:
        streams = [engine.submit(REQUESTS[i % 2]) for i in range(8)]
        found = [stream.read().data for stream in streams]
        assert engine.stats.ended == {"finished": 8}
    assert found == found[:2] * 4


def test_a_lane_shrinks_where_prompts_that_enter_their_rows_do_not_fit(runs, monkeypatch):
    """The compiler may ask for memory too, beside rows that are not yet fewer."""
    call = programs.LanePrograms.read_into_rows
    monkeypatch.setattr(programs.LanePrograms, "read_into_rows", out_of_memory_above(3, call))

    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(programs.LanePrograms, "lower_reading", lambda lane, size: Lowered())
    engine = Engine(runs["transformer"], replace(INTO_ROWS, lanes=(Lane(slots=6, capacity=176),)))
    with pytest.warns(LaneShrunkWarning, match="6 rows of 176 bytes does not fit, it gets 3"):
        engine.warm()
    assert engine.lanes == (Lane(slots=3, capacity=176),)
    with engine:
        found = [stream.read().data for stream in [engine.submit(REQUESTS[i % 2]) for i in range(8)]]
    assert found == found[:2] * 4


def test_other_errors_and_one_row_that_does_not_fit_are_told(runs, monkeypatch):
    monkeypatch.setattr(programs.LanePrograms, "decode", out_of_memory_above(0, None))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        Engine(runs["transformer"], replace(CONFIG, lanes=(Lane(slots=1, capacity=176),))).warm()

    def fail(lane, live):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(programs.LanePrograms, "decode", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Engine(runs["transformer"], CONFIG).warm()
