"""Rows that draft get the bytes that they get without, and tell the same of them."""

from dataclasses import replace

import numpy as np
import pytest

from jaxblt.inference import Drafts
from jaxblt.inference.engine import Engine, Request, Sampling, drafted_lane
from jaxblt.inference.engine.config import ARRAYS
from tests.inference.engine.test_engine import CONFIG, LONG, REQUESTS

SAME = [Request(b"x" * 20, 50, Sampling(seed=i, alphabet=b"x", presence_penalty=-100.0)) for i in range(3)]
"""Behind the first byte the penalty leaves no other, so that drafts are right."""

ASKED = [*REQUESTS, *SAME]


def read(run, drafts, requests=ASKED, **options):
    """Return the pieces of requests that decode side by side, twice, and the engine's numbers."""
    with Engine(run, replace(CONFIG, drafts=drafts, **options)) as engine:
        found = [
            [stream.read() for stream in map(engine.submit, order)] for order in (requests, requests[::-1])
        ]
        return found[0], found[1][::-1], engine.stats


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_drafted_lane")
@pytest.mark.parametrize("name", ["transformer", "patches"])
def test_drafts_change_no_bit(name, runs):
    """Of bytes, predictions and ends of patches, whatever decodes beside; one by one, logits are rounded otherwise."""
    single, _, _ = read(runs[name], None)
    plain, again, none = read(runs[name], Drafts(count=0))
    compiled = drafted_lane._decode._cache_size()
    drafted, late, some = read(runs[name], Drafts(order=1))
    for one, *others in zip(plain, again, drafted, late, strict=True):
        for other in others:
            assert (other.data, other.finish) == (one.data, one.finish)
            for array in ARRAYS:
                np.testing.assert_array_equal(getattr(other, array), getattr(one, array))
    assert [piece.data for piece in plain] == [piece.data for piece in single]
    assert [piece.finish for piece in plain] == [piece.finish for piece in single]
    for one, other in zip(plain, single, strict=True):
        np.testing.assert_array_equal(one.closed, other.closed)
    assert none.drafted_bytes == 0 < some.accepted_bytes <= some.drafted_bytes
    assert some.rounds < none.rounds
    assert min(none.known_bytes, some.known_bytes) > 0
    assert drafted_lane._decode._cache_size() == compiled


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_drafted_lane")
def test_a_request_that_ends_hands_out_all_its_bytes(runs):
    """One byte, limits at any place of a round, and the end of a lane."""
    never_ends = Sampling(temperature=0, presence_penalty=-1.0)
    requests = [Request(LONG[:31], limit, never_ends) for limit in (1, 2, 5, 31, 144)]
    found, _, _ = read(runs["transformer"], Drafts(order=1), requests)
    assert [len(piece.data) for piece in found] == [1, 2, 5, 31, 144]
    assert all(found[-1].data.startswith(piece.data) for piece in found)
    assert {piece.finish for piece in found} == {"length"}
