"""Routers as earlier versions stored them, with a field for each kind of read: their codes are those of then."""

import json

import numpy as np
import pytest

from jaxblt.adapters import (
    ChunkMean,
    Neighbours,
    Prefix,
    RecurrentMemory,
    RouterConfig,
    Side,
    Traces,
)
from jaxblt.adapters.code.experimental.mixed import Mixed
from jaxblt.training.stored.serialize import from_json, to_json
from tests.adapters.routing import DOCUMENTS, inputs, params_of, whole

LEVELS = {
    "class": "mixed_levels",
    "levels": ["prefix", "chunk", "token"],
    "by": "gate",
    "at": [],
    "prices": [],
}
INDEX = {"class": "retrieval", "index": "index", "capacity": 12, "neighbours": 3}
ROUTER = {
    "class": "router",
    "chunk": 5,
    "lag": 1,
    "prefix": 3,
    "hidden": 4,
    "fallback": 1.0,
    "memory": None,
    "side": 0,
    "retrieval": None,
    "packed": True,
    "segment_alignment": 1,
    "reads": "stack",
}
MIXED = ROUTER | {"level": LEVELS, "lag": 2, "memory": "gru", "side": 2, "retrieval": INDEX}
TRACES = ROUTER | {"level": "token", "prefix": None, "memory": "traces", "side": 2, "reads": "block"}
STORED = {
    "mixed": (
        {"rank": 3, "blocks": None, "router": MIXED, "code": [{"class": "ema", "decay": 0.5}]},
        RouterConfig(
            Mixed(),
            chunk=5,
            lag=2,
            reads=(ChunkMean(), RecurrentMemory(), Side(2), Neighbours(capacity=12, count=3), Prefix(3)),
            hidden=4,
        ),
        [[2.361621, 3.011905, 2.378049], [0.667612, 4.998966, 3.160016], [2.732076, 1.002792, 1.056679]],
    ),
    "traces": (
        {"rank": 4, "blocks": 2, "router": TRACES, "code": []},
        RouterConfig("token", chunk=5, reads=(ChunkMean(), Traces(), Side(2)), hidden=4, per="block"),
        [[0.742135, 0.257865], [0.228130, 0.771870], [0.110116, 0.889884]],
    ),
    "prefix": (
        {"rank": 3, "blocks": None, "router": ROUTER | {"level": "prefix"}, "code": []},
        RouterConfig("prefix", chunk=5, reads=(ChunkMean(), Prefix(3)), hidden=4),
        [[2.240178, 0.108331, -0.274142], [2.897263, -3.465575, -0.070407], [2.515809, -0.283931, -0.360540]],
    ),
}
"""By name: fields of an adapter as they were stored, the router of today, and codes of three tokens then."""


@pytest.mark.slow(days=28, group="costly", turn="adapters/test_stored_routers")
@pytest.mark.parametrize("name", STORED)
def test_a_stored_router_has_the_codes_that_it_had(name):
    stored, router, expected = STORED[name]
    config = from_json(json.dumps({"class": "adapter"} | stored))
    assert config.router == router
    assert from_json(to_json(config)) == config
    side = np.random.default_rng(11).standard_normal((*DOCUMENTS.shape, 2)).astype(np.float32)
    given = {"side": side} if router.side else {}
    code = whole(config, params_of(config, **given), inputs(), DOCUMENTS, **given)
    np.testing.assert_allclose(code[[0, 0, 1], [15, 33, 26]], expected, rtol=1e-5, atol=1e-5)


def test_fields_that_were_never_stored_take_their_defaults():
    assert from_json(json.dumps({"class": "router", "level": "token"})) == RouterConfig("token")
    found = from_json(json.dumps({"class": "router", "chunk": 8, "memory": "gru"}))
    assert found == RouterConfig(chunk=8, reads=(ChunkMean(), RecurrentMemory(), Prefix(128)))
    with pytest.raises(ValueError, match=r"RouterConfig\.memory = 'lstm', expected one of"):
        from_json(json.dumps({"class": "router", "memory": "lstm"}))
