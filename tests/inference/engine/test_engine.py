"""Many requests at once get the bytes that each gets alone, also on a mesh."""

import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax._src.core import EvalTrace

from jaxblt.data.vocab import OFFSET
from jaxblt.inference import generate
from jaxblt.inference.engine import Engine, EngineConfig, Lane, Refused, Request, Sampling, programs
from jaxblt.parallel import make_mesh
from jaxblt.training.start.placement import place_params
from tests.inference.engine.conftest import Made

CONFIG = EngineConfig(lanes=(Lane(slots=3, capacity=176),), piece_bytes=64, prefix_bytes=1 << 20)
INTO_ROWS = replace(CONFIG, prefix_bytes=0, piece_bytes=256)
"""Prompts are read straight into their rows."""
LONG = bytes(range(32, 132))
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(seed=1),
    Sampling(seed=2, top_k=5, frequency_penalty=0.5),
    Sampling(seed=3, top_p=0.5, presence_penalty=1.5),
    Sampling(seed=4, alphabet=b"ACGT"),
)
PROMPTS = (b"", b"once", LONG, LONG[:65] + b"?", LONG)
REQUESTS = [
    Request(prompt, 5 + 7 * i, sampling)
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
]


@pytest.fixture(scope="module")
def engines(runs):
    made = Made(lambda name: Engine(runs[name], CONFIG).__enter__())
    yield made
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def alone(engines):
    """The bytes of each request, one after another, on engines that know no prompt yet."""
    return Made(lambda name: [engines[name].submit(request).read() for request in REQUESTS])


PATCHES = pytest.param(
    "patches", marks=pytest.mark.slow(days=28, group="costly", turn="inference/engine/patches")
)
NAMES = ("transformer", pytest.param("hyena", marks=pytest.mark.slow(days=28, group="costly")), PATCHES)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_same_whatever_the_load(name, engines, alone):
    """Beside requests that come in any order, leave early, and begin as others do."""
    expected, engine, choose = alone[name], engines[name], random.Random(0)
    calls = (programs._read, programs._enter, programs._decode)
    compiled = [call._cache_size() for call in calls]
    for _ in range(3):
        order = [choose.randrange(len(REQUESTS)) for _ in range(12)]
        streams = [engine.submit(REQUESTS[i]) for i in order]
        gone = dict.fromkeys(choose.sample(range(12), 3), b"")
        for place in gone:
            gone[place] = next(streams[place]).data
            streams[place].cancel()
        for place, (i, stream) in enumerate(zip(order, streams, strict=True)):
            if place in gone:
                assert expected[i].data.startswith(gone[place] + b"".join(piece.data for piece in stream))
                continue
            found = stream.read()
            assert found.data == expected[i].data
            assert found.finish == expected[i].finish
            np.testing.assert_array_equal(found.closed, expected[i].closed)
            np.testing.assert_array_equal(found.logprobs, expected[i].logprobs)
    assert any(piece.closed.any() for piece in expected) == (name == "patches")
    assert engine.stats.known_bytes > 0
    assert engine.stats.running == engine.stats.waiting == 0
    # No setting of a request is part of a program
    assert [call._cache_size() for call in calls] == compiled


MANY = EngineConfig(lanes=(Lane(slots=16, capacity=400),), piece_bytes=256)
LONGER = LONG + LONG + LONG
SEVERAL = [Request(LONGER[:n], 6, Sampling(seed=n)) for n in (*range(0, 60, 5), 70, 255, 256, 300)]
"""Prompts of one short piece, of one piece, and of a piece and a short one."""


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("name", ["transformer", PATCHES])
def test_prompts_that_are_read_together_keep_their_bytes(name, runs, monkeypatch):
    """One program reads all short ones that wait, whichever come together; calls that are not full are padded."""
    calls, plain = [], programs.LanePrograms.read_into_rows

    def read(lane, slots, requests, ids, size, *before):
        calls.append((len(ids), size))
        return plain(lane, slots, requests, ids, size, *before)

    monkeypatch.setattr(programs.LanePrograms, "read_into_rows", read)

    with Engine(runs[name], MANY) as engine:
        alone = [engine.submit(request).read() for request in SEVERAL]
    assert {count for count, _ in calls} == {1}
    calls.clear()
    compiled = programs._read_into_rows._cache_size()
    engine = Engine(runs[name], MANY)
    streams = [engine.submit(request) for request in SEVERAL[::-1]]
    with engine:
        together = [stream.read() for stream in streams][::-1]
    # The ends of the two longest are read alone, the others by fours while rows decode
    first, second, *others = (count for count, size in calls if size == 64)
    assert first == second == 1
    assert min(others) >= 4
    assert sum(others) == sum(len(request.prompt) < 64 for request in SEVERAL)
    assert programs._read_into_rows._cache_size() == compiled
    for one, other in zip(alone, together, strict=True):
        assert (other.data, other.finish) == (one.data, one.finish)
        np.testing.assert_array_equal(other.logprobs, one.logprobs)
        np.testing.assert_array_equal(other.closed, one.closed)


@pytest.mark.slow(days=28, group="costly", turn="the end of a prompt")
@pytest.mark.parametrize("prefix_bytes", [0, 1 << 20])
def test_the_end_of_a_prompt_is_read_behind_its_beginning_in_one_round(prefix_bytes, runs):
    """While no row decodes, a round may read the end of one prompt, and both pieces of the next."""
    config = replace(INTO_ROWS, lanes=(Lane(slots=3, capacity=400),), prefix_bytes=prefix_bytes)
    requests = [Request(bytes([97 + i]) * 300, 16, Sampling(seed=i)) for i in range(3)]
    with Engine(runs["transformer"], config) as engine:
        alone = [engine.submit(request).read().data for request in requests]
    engine = Engine(runs["transformer"], config)
    streams = [engine.submit(request) for request in requests]
    with engine:
        assert [stream.read().data for stream in streams] == alone


@pytest.mark.slow(days=28, group="costly")
def test_one_program_reads_sixty_four_prompts_that_wait(runs, monkeypatch):
    """`generate` reads them by one call too; no prompt is read before its neighbours, nor copied into its row."""
    programs_sent = Counter()
    for name in ("_begin", "_read", "_join", "_enter", "_read_into_rows", "_copy"):

        def send(*given, plain=getattr(programs, name), name=name):
            programs_sent[name] += 1
            return plain(*given)

        monkeypatch.setattr(programs, name, send)
    engine = Engine(runs["transformer"], EngineConfig(lanes=(Lane(64, 80),), piece_bytes=256))
    programs_sent.clear()
    streams = [engine.submit(Request(LONG[: i % 60], 8)) for i in range(64)]
    with engine:
        assert all(len(stream.read().data) <= 8 for stream in streams)
    assert programs_sent == {"_read_into_rows": 1}
    assert engine.stats.prompt_bytes == sum(1 + i % 60 for i in range(64))


@pytest.mark.slow(days=28, group="costly")
def test_parameters_that_are_bound_to_their_device_compile_no_program_twice(runs):
    """Those of a loaded run are, and what a program returns from them; so the rows must be from the start."""
    run = runs["transformer"]
    bound = jax.device_put(run.decoder_params, jax.devices()[0])
    lane = programs.LanePrograms(run.decoder, bound, Lane(16, 400), 256)
    sent, found = (programs._decode, programs._read, programs._read_into_rows, programs._enter), []
    for _ in range(2):
        lane.decode({0})
        held, _ = lane.read([None], [np.ones(256, np.int32)], 256)
        held, _ = lane.read([held], [np.ones(256, np.int32)], 256)
        lane.read_into_rows([0], [SEVERAL[0]], [np.ones(300, np.int32)], 64, held, 256)
        lane.read_into_rows([1], [SEVERAL[0]], [np.ones(1, np.int32)], 64)
        lane.enter(held, [2], [SEVERAL[0]], [np.ones(512, np.int32)])
        found.append([program._cache_size() for program in sent])
    assert found[1] == found[0]
    assert all(leaf.committed for leaf in jax.tree.leaves((lane._rows, lane._spare, held)))


def test_the_device_is_asked_by_programs_only_and_never_under_the_lock(engines, alone, monkeypatch):
    """An operation of its own would wait for the device, and hold up the threads that answer clients."""
    engine, seen, copied, plain = engines["transformer"], [], [], EvalTrace.process_primitive
    assert alone["transformer"]

    def process(trace, primitive, *given):
        seen.append(primitive.name)
        return plain(trace, primitive, *given)

    def copy(prompt):
        copied.append(engine._changed._is_owned())
        return programs.copy_prompt(prompt)

    monkeypatch.setattr(EvalTrace, "process_primitive", process)
    monkeypatch.setattr("jaxblt.inference.engine.engine.copy_prompt", copy)
    for request in REQUESTS:
        engine.submit(request).read()
    assert set(seen) <= {"jit"}
    assert copied
    assert not any(copied)


def test_bytes_are_handed_out_while_the_next_round_is_sent(engines, monkeypatch):
    """A program that looks at conditions keeps the thread that sends it."""
    engine = engines["transformer"]
    (lane,), begun, seen, send = engine._lanes, engine.stats.drawn_bytes, [], engine._lanes[0].decode

    def decode(slots):
        table, deadline = send(slots), time.monotonic() + 10
        # The first round has none before it
        while seen and engine.stats.drawn_bytes - begun == seen[-1] and time.monotonic() < deadline:
            time.sleep(1e-3)
        seen.append(engine.stats.drawn_bytes - begun)
        return table

    monkeypatch.setattr(lane, "decode", decode)
    engine.submit(Request(LONG, 17)).read()
    assert seen[:3] == [0, 8, 16]


@pytest.mark.slow(days=28, group="costly")
@pytest.mark.parametrize("name", ["transformer", PATCHES])
def test_bytes_are_those_of_generate(name, runs, alone):
    """With a seed for each prompt; penalties are the engine's own."""
    run, asked = runs[name], [request for request in REQUESTS if not request.sampling.frequency_penalty]
    asked = [request for request in asked if not request.sampling.presence_penalty]
    found = generate(
        run.decoder,
        run.decoder_params,
        [request.prompt for request in asked],
        max_new_bytes=[request.max_new_bytes for request in asked],
        sampling=[request.sampling.config for request in asked],
        seed=[request.sampling.seed for request in asked],
        alphabet=[request.sampling.alphabet for request in asked],
    )
    assert found == [alone[name][REQUESTS.index(request)].data for request in asked]


def test_pieces_tell_of_their_bytes(alone):
    greedy = alone["transformer"][0]
    assert greedy.finish == "length"
    assert len(greedy.data) == len(greedy.entropies) == len(greedy.closed) == 5
    # The most probable byte may not be an id that is never drawn
    drawn = np.frombuffer(greedy.data, np.uint8) + OFFSET
    best = greedy.top_ids == drawn[:, None]
    np.testing.assert_array_equal(greedy.top_logprobs[best], greedy.logprobs[best.any(1)])
    assert (greedy.entropies > 0).all()
    assert (np.diff(greedy.top_logprobs, axis=1) <= 0).all()
    assert set(alone["transformer"][4].data) <= set(b"ACGT")


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_stop_string_ends_a_request_before_it(length, engines, alone):
    """Wherever rounds cut it; what comes before it is handed out once no stop string can begin there."""
    whole = alone["transformer"][3].data
    stop = whole[6 : 6 + length]
    before = whole[: whole.index(stop)]
    request = REQUESTS[3]
    request = replace(request, sampling=replace(request.sampling, stop=(b"never", stop)))
    pieces = list(engines["transformer"].submit(request))
    assert b"".join(piece.data for piece in pieces) == before
    assert [piece.finish for piece in pieces][-1] == "stop"
    assert sum(len(piece.logprobs) for piece in pieces) == len(before)


def test_the_prefix_cache_keeps_what_prompts_share_within_its_budget(runs):
    with Engine(runs["transformer"], CONFIG) as engine:
        first = engine.submit(Request(LONG, 3)).read()
        assert engine.stats.known_bytes == 0
        # The same prompt needs no reading, one that begins alike only what is behind the piece's edge
        assert engine.submit(Request(LONG, 3)).read().data == first.data
        assert engine.stats.known_bytes == 101
        engine.submit(Request(LONG[:70] + b"?", 3)).read()
        assert engine.stats.known_bytes == 101 + 64
        size = engine._prefixes.used // 3
    with Engine(runs["transformer"], replace(CONFIG, prefix_bytes=size)) as engine:
        for prompt in (b"one", b"two", b"one", b"one"):
            engine.submit(Request(prompt, 1)).read()
        assert engine._prefixes.used == size
        assert engine.stats.known_bytes == 4


def test_a_request_ends_at_its_deadline_or_with_its_reader(runs):
    """Both give back their slots; requests in the queue count too."""
    now = [0.0]
    engine = Engine(runs["transformer"], replace(CONFIG, max_waiting=2), clock=lambda: now[0])
    late, unread, left, queued, last = (
        engine.submit(request)
        for request in (
            Request(b"a", 100, deadline_s=3),
            Request(b"b", 100, max_unread=40),
            Request(b"c", 100),
            Request(b"d", 100, deadline_s=2),
            Request(b"e", 8),
        )
    )
    with pytest.raises(Refused, match="2 requests wait"):
        engine.submit(Request(b"f", 8))
    with left:
        while not left.unread:
            engine._round()
    now[0] = 2.0
    engine._round()
    assert (left.finish, queued.finish, late.finish, unread.finish) == ("cancelled", "expired", None, None)
    while unread.finish is None:
        engine._round()
    assert unread.finish == "cancelled"
    assert len(unread.read().data) == 40
    now[0] = 3.0
    engine._round()
    assert late.finish == "expired"
    with engine:
        assert len(last.read().data) == 8
        # What was taken does not come again
        assert (last.read().data, last.read().finish) == (b"", "length")
    assert engine.stats.ended == {"refused": 1, "cancelled": 2, "expired": 2, "finished": 1}
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(Request(b"g"))


def test_logits_that_are_not_finite_end_their_request(runs):
    run = runs["transformer"]
    broken = replace(run, params={**run.params, "head": {"norm": {"scale": np.full(16, np.nan, np.float32)}}})
    with (
        Engine(broken, CONFIG) as engine,
        pytest.raises(ValueError, match="not finite: byte 0 after a prompt of 2"),
    ):
        engine.submit(Request(b"ab", 9)).read()
    assert engine.stats.ended == {"failed": 1}


def test_an_engine_that_fails_tells_all_readers(runs, monkeypatch):
    engine = Engine(runs["transformer"], CONFIG)
    streams = [engine.submit(Request(b"ab", 9)) for _ in range(5)]
    monkeypatch.setattr(engine._lanes[0], "decode", lambda slots: 1 / 0)
    with engine:
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine failed: division by zero"):
                stream.read()
    with pytest.raises(RuntimeError, match="the engine failed"):
        engine.submit(Request(b"ab", 9))


def test_generate_waits_for_room(runs, alone):
    prompts = [PROMPTS[i] for i in (0, 1, 0, 1)]
    with Engine(runs["transformer"], replace(CONFIG, max_waiting=1)) as engine:
        found = engine.generate(prompts, max_new_bytes=5, sampling=SAMPLINGS[0])
    assert found[0] == found[2] == alone["transformer"][0].data
    assert found[1] == found[3]
    assert not [thread for thread in threading.enumerate() if thread is engine._thread]


@pytest.mark.slow(days=28, group="costly", turn="inference/engine/test_mesh")
@pytest.mark.parametrize("config", [CONFIG, INTO_ROWS], ids=["prefixes", "into rows"])
def test_weights_are_split_and_bytes_are_those_of_one_device(runs, config):
    with Engine(runs["transformer"], config) as engine:
        alone = [stream.read().data for stream in map(engine.submit, REQUESTS)]
    run, mesh = runs["transformer"], make_mesh(tensor=2, devices=jax.devices()[:2])
    params, frozen = place_params(run.recipe, run.params, run.frozen, mesh)
    engine = Engine(replace(run, params=params, frozen=frozen), config, mesh=mesh)
    split = [leaf for leaf in jax.tree.leaves(engine._params) if not leaf.sharding.is_fully_replicated]
    assert split
    engine.warm()
    calls = (programs._read, programs._read_into_rows, programs._decode)
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
