"""Settings are values to the compiled programs; bytes come in pieces that are the whole, cut."""

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxblt.inference import Decoder, SamplingConfig, generate
from jaxblt.inference.generate import PIECE, _sent
from jaxblt.inference.requests import bucket
from jaxblt.mixers import AttentionConfig
from jaxblt.models import ByteLMConfig, StackConfig
from jaxblt.models.packed import pack_small
from jaxblt.parallel import make_mesh, replicated
from tests.mixer_table import table
from tests.parameters import drawn

HEADS = AttentionConfig(dim=8, num_heads=2)
STACK = StackConfig(dim=8, num_layers=2, pattern="WA", mlp_dim=8, mixers=table(attention=HEADS, window=8))
GREEDY, WARM, EVEN = (SamplingConfig(temperature=t) for t in (0, 0.9, 1e6))
PROMPTS = [b"ab", b"a longer prompt"]
EARLY, LATE = 20, 7
"""Seeds with which evenly drawn bytes reach EOS in the first piece, and in the second."""


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The events of programs that are compiled inside the block."""
    found: list[str] = []

    def count(event: str, duration: float, **about: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture(scope="module")
def write():
    """Generates from a byte model, at two prompts and at most 64 bytes by the same two programs."""
    config = ByteLMConfig(stack=STACK)
    params = {"model": drawn(config.build(), jnp.ones((1, 8), jnp.int32))["params"]}
    call = partial(generate, Decoder(config), params)
    call(PROMPTS, max_new_bytes=40)
    return call


SETTINGS = [
    {"sampling": GREEDY},
    {"sampling": SamplingConfig(temperature=0.3)},
    {"sampling": SamplingConfig(top_k=5)},
    {"sampling": SamplingConfig(top_k=400, top_p=0.5)},
    {"sampling": [GREEDY, SamplingConfig(top_p=0.7)]},
    {"max_new_bytes": 64},
    {"max_new_bytes": [3, 33]},
    {"seed": [1, 2]},
    {"prompts": [b"", b"x" * 63]},
]


@pytest.mark.slow(days=28, group="costly")
def test_other_settings_compile_nothing(write):
    with counted_compilations() as compiled:
        for change in SETTINGS:
            asked = {"prompts": PROMPTS, "max_new_bytes": 40} | change
            whole = write(**asked)
            pieces = list(write(**asked, stream=True))
            assert [b"".join(parts) for parts in zip(*pieces, strict=True)] == whole
            limits = asked["max_new_bytes"]
            for text, limit in zip(whole, limits if isinstance(limits, list) else [limits] * 2, strict=True):
                assert len(text) <= limit
            assert all(len(part) <= PIECE for piece in pieces for part in piece)
    assert not compiled
    with counted_compilations() as compiled:
        write(PROMPTS, max_new_bytes=65)
    assert compiled


@pytest.mark.slow(days=28, group="decoding")
@pytest.mark.parametrize("axes", [{"data": 2, "seq": 1}, {"data": 1, "seq": 2}], ids=str)
def test_pieces_over_several_devices_share_a_program(write, axes):
    """The state comes out of a piece laid out as it went in."""
    decoder, params = write.args
    mesh = make_mesh(**axes, devices=jax.devices()[:2])
    with jax.set_mesh(mesh), counted_compilations() as compiled:
        split = generate(decoder, jax.device_put(params, replicated(mesh)), PROMPTS, max_new_bytes=64)
    assert split == write(PROMPTS, max_new_bytes=64)
    assert sum("_advance" in name for name in compiled) == 1


@pytest.mark.slow(days=28, group="costly")
def test_a_row_keeps_its_settings_in_any_company(write):
    options = {"sampling": [GREEDY, WARM], "max_new_bytes": [33, 40], "seed": [7, 8]}
    first, second = write(PROMPTS, **options)
    turned = write(PROMPTS[::-1], **{name: value[::-1] for name, value in options.items()})
    assert turned == [second, first]
    assert write([PROMPTS[0], b"another"], sampling=GREEDY, max_new_bytes=33, seed=9)[0] == first
    assert len(first) == 33
    assert write(PROMPTS, sampling=WARM, max_new_bytes=40, seed=[7, 8])[1] == second


@pytest.mark.slow(days=28, group="costly")
def test_eos_ends_the_stream(write):
    ask = partial(write, PROMPTS, sampling=EVEN, max_new_bytes=64)
    one, other = ask(seed=[EARLY, LATE])
    assert len(one) < PIECE <= len(other) < 64
    assert len(list(ask(seed=[EARLY, LATE], stream=True))) == 2
    [piece] = ask(seed=[EARLY, EARLY], stream=True)
    assert piece[0] == one


def test_the_device_has_the_next_piece_before_one_is_read():
    sent = []

    def advance(place, start):
        sent.append(int(start))
        return place, start

    begun = [(start, len(sent)) for start, _ in _sent(advance, pack_small(()), range(0, 96, 32))]
    assert begun == [(0, 2), (32, 3), (64, 3)]


def test_requests_are_checked_at_the_call(write):
    with pytest.raises(ValueError, match="max_new_bytes must be an integer from 1 to 2147483647, got 0"):
        write(PROMPTS, max_new_bytes=[3, 0], stream=True)
    with pytest.raises(
        ValueError, match="max_new_bytes must be one integer, or one for each of the 2 prompts, got 3"
    ):
        write(PROMPTS, max_new_bytes=[3, 4, 5])
    with pytest.raises(
        ValueError, match="sampling must be one SamplingConfig, or one for each of the 2 prompts, got 1"
    ):
        write(PROMPTS, max_new_bytes=3, sampling=[GREEDY])
    with pytest.raises(ValueError, match=r"sampling must be a SamplingConfig, got 0\.5"):
        write(PROMPTS, max_new_bytes=3, sampling=0.5)


@pytest.mark.parametrize(
    ("count", "length"), [(1, 64), (64, 64), (65, 128), (300, 320), (1100, 1280), (10**6, 2**20)]
)
def test_buckets(count, length):
    """Few lengths, and none that is much too large."""
    assert count <= bucket(count) <= max(count + 63, count * 5 // 4)
    assert bucket(count) == length
