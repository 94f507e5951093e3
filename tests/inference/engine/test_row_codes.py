"""Requests that choose an adapter, side by side in the rows of one lane."""

import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxblt.adapters import AdapterConfig, attach
from jaxblt.inference import Decoder, generate
from jaxblt.inference.engine import Engine, EngineConfig, Lane, Request, Sampling, programs
from jaxblt.inference.unroll import unroll_params
from tests.answers.runs import make_run
from tests.inference.test_adapters import BASE, PROMPTS, ROUTER
from tests.parameters import drawn

CONFIG = EngineConfig(lanes=(Lane(slots=3, capacity=64),), piece_bytes=8, prefix_bytes=1 << 20)
SITES = ("mixer/v", "mlp/down")
"""With products before the cache, which a prompt that is read with another adapter leaves otherwise."""
MODEL = attach(BASE, AdapterConfig(sites=SITES, rank=4, blocks=2, alpha=16.0, router=ROUTER))
ADAPTERS = (0, 1, "base", "static", None)
REQUESTS = [Request(PROMPTS[1], 48, Sampling(seed=7), adapter=adapter) for adapter in ADAPTERS]


@pytest.fixture(scope="module")
def run():
    return make_run(MODEL, params=drawn(MODEL.build(), jnp.zeros((1, 8), jnp.int32))["params"])


@pytest.fixture(scope="module")
def alone(run):
    """The bytes of each request, on an engine that reads every prompt."""
    with Engine(run, replace(CONFIG, prefix_bytes=0)) as engine:
        return [engine.submit(request).read().data for request in REQUESTS]


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_row_codes")
def test_rows_of_many_adapters_decode_in_one_program(run, alone):
    """In any order, and when their prompts are known: an adapter is a value."""
    calls = (programs._read, programs._enter, programs._decode)
    compiled = [call._cache_size() for call in calls]
    assert len(set(alone)) == len(ADAPTERS)
    with Engine(run, CONFIG) as engine:
        assert engine.adapters == ("base", "static", 0, 1)
        assert [stream.read().data for stream in map(engine.submit, REQUESTS)] == alone
        # Each prompt is read with its own adapter, although all are equal
        assert engine.stats.known_bytes == 0
        again = [engine.submit(request) for request in reversed(REQUESTS)]
        assert [stream.read().data for stream in again] == alone[::-1]
        assert engine.stats.known_bytes == sum(request.length for request in REQUESTS)
    assert [call._cache_size() for call in calls] == compiled


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_row_codes")
def test_prompts_that_are_read_into_their_rows_have_their_adapters(run, alone):
    """In one program too, whose layers are named one by one."""
    engine = Engine(run, replace(CONFIG, prefix_bytes=0, piece_bytes=128))
    streams = [engine.submit(request) for request in REQUESTS]
    with engine:
        assert [stream.read().data for stream in streams] == alone


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_row_codes")
def test_bytes_of_an_adapter_are_those_of_generate(run, alone):
    asked = {"max_new_bytes": 48, "seed": [7] * len(REQUESTS), "adapters": ADAPTERS}
    prompts = [request.prompt for request in REQUESTS]
    assert generate(run.decoder, run.decoder_params, prompts, **asked) == alone


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_row_codes")
def test_routers_of_blocks_take_the_adapter_of_their_row():
    """Rows decode layer by layer, so the layers of a scanned stack have other names there."""
    router = replace(ROUTER, per="block")
    model = attach(
        replace(BASE, stack=replace(BASE.stack, num_layers=2)), AdapterConfig(rank=2, router=router)
    )
    params = drawn(model.build(), jnp.zeros((1, 8), jnp.int32))["params"]
    with Engine(make_run(model, params=params), CONFIG) as engine:
        streams = [engine.submit(request) for request in REQUESTS[2:]]
        found = [stream.read().data for stream in streams]
    apart = replace(model, stack=replace(model.stack, scan=False))
    asked = {"max_new_bytes": 48, "seed": [7] * 3, "adapters": ADAPTERS[2:]}
    expected = generate(Decoder(apart), {"model": unroll_params(params)}, [PROMPTS[1]] * 3, **asked)
    assert found == expected
    assert generate(Decoder(model), {"model": params}, [PROMPTS[1]] * 3, **asked) == expected
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("config", "adapter", "said"),
    [
        (MODEL, 2, "adapter 2 of a row: expected a number from 0 to 1, 'base', 'static' or None"),
        (
            MODEL,
            "poet",
            "Request.adapter must be a whole number or one of 'base', 'static' or None, got 'poet'",
        ),
        (MODEL, True, "Request.adapter must be"),
        (None, 0, "ByteLMConfig has no router: leave adapters out"),
    ],
)
def test_an_adapter_that_there_is_not_is_refused(config, adapter, said, run, runs):
    engine = Engine(runs["transformer"] if config is None else run, CONFIG)
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        engine.submit(Request(b"a", adapter=adapter))
    assert "\n" not in str(raised.value)
