"""Drafted bytes are those without drafts, whatever is drafted."""

import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import EOS, OFFSET
from jaxblt.inference import Decoder, Drafts, SamplingConfig, generate
from jaxblt.inference.drafts import MOST_DRAFTED, draft
from jaxblt.mixers import AttentionConfig, GatedDeltaNetConfig, HyenaConfig, ModalFilter
from jaxblt.models import BLTConfig, ByteLMConfig, StackConfig
from jaxblt.patching import PatcherConfig, make_patches
from tests.mixer_table import table
from tests.parameters import drawn

MIXERS = {
    "attention": AttentionConfig(dim=16, num_heads=2),
    "hyena": HyenaConfig(dim=16, filter=ModalFilter(modes=4, max_timescale=64.0)),
    "linear": GatedDeltaNetConfig(dim=16, num_heads=2, head_dim=8, chunk_size=8),
}
PATCHER = PatcherConfig(mode="entropy", threshold=5.2, block_size=16, capacity=12)
WAYS = (Drafts(count=0), Drafts(), Drafts(count=MOST_DRAFTED, drafter="counts", order=1))
PROMPTS = [b"", b"abcabcabcabc", b"the cat and the dog and " * 2, b"x" * 33, b"y" * 31, b"abababab"] * 2
LIMITS = [30, 25, 20, 15, 1, 32] * 2
SAMPLING = [
    SamplingConfig(temperature=0),
    SamplingConfig(temperature=0.5, top_k=2),
    SamplingConfig(top_p=0.9),
    SamplingConfig(),
    SamplingConfig(),
    SamplingConfig(temperature=0),
] * 2
ALPHABETS = [b"abc", b"abc", None, b"x", None, None] * 2


def stack(name):
    return StackConfig(dim=16, num_layers=1, pattern=(name,), mlp_dim=0, mixers={name: MIXERS[name]})


@cache
def decoding(name):
    ids = jnp.ones((1, 16), jnp.int32)
    if name != "patches":
        config = ByteLMConfig(stack=stack(name))
        return Decoder(config), {"model": drawn(config.build(), ids)["params"]}
    mixers = table(attention=MIXERS["attention"], window=8)
    local = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=0, mixers=mixers)
    entropy, config = (
        ByteLMConfig(stack=local),
        BLTConfig(local, stack("attention"), local, None, bridge_heads=2),
    )
    patches = jax.eval_shape(partial(make_patches, PATCHER), ids, entropies=jnp.zeros(ids.shape))
    return Decoder(config, PATCHER, entropy), {
        "model": drawn(config.build(), ids, patches=patches)["params"],
        "entropy": drawn(entropy.build(), ids)["params"],
    }


def continued(name, prompts=tuple(PROMPTS), *, params=None, **options):
    decoder, own = decoding(name)
    given = {"max_new_bytes": LIMITS, "sampling": SAMPLING, "seed": list(range(12)), "alphabet": ALPHABETS}
    return generate(decoder, params or own, list(prompts), **(given | options))


turns = pytest.mark.slow(days=28, group="decoding")


@pytest.mark.parametrize(
    "name", ["attention", *(pytest.param(name, marks=turns) for name in ("hyena", "linear", "patches"))]
)
def test_drafts_change_no_byte(name):
    """Rows accept and end at different bytes; the same program runs without drafts, and another byte by byte."""
    told, texts, warned = [], [], []
    for drafts in (None, *WAYS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            texts.append(continued(name, drafts=drafts, report=None if drafts is None else told.append))
        warned.append([str(warning.message) for warning in caught])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert warned[0] == warned[1] == warned[2] == warned[3]
    assert len(warned[0]) == (name == "patches")
    assert len({len(text) for text in texts[0]}) > 3
    none, some, many = told
    assert none.drawn == some.drawn == tuple(map(len, texts[0]))
    assert sum(none.drafted) == 0 < sum(some.accepted) <= sum(some.drafted) < sum(many.drafted)
    assert some.calls <= none.calls
    assert str(some).startswith(f"{sum(some.drawn)} bytes in {some.calls} calls; ")


@pytest.mark.slow(days=28, group="costly", turn="inference/test_drafts")
def test_accepted_drafts_save_calls():
    """A greedy row of one letter: all drafts are right, and the windows alone bound them."""
    told = []
    options = {"sampling": SamplingConfig(temperature=0), "max_new_bytes": 64}
    for drafts in (Drafts(count=0), Drafts(count=16, order=1)):
        texts = continued("attention", [b"x" * 31] * 12, drafts=drafts, report=told.append, **options)
    assert texts == continued("attention", [b"x" * 31] * 12, **options)
    assert told[0].calls == max(map(len, texts))
    assert told[1].calls < told[0].calls / 2


@pytest.mark.slow(days=28, group="costly", turn="inference/test_drafts")
def test_pieces_come_as_they_are_drawn():
    pieces = list(zip(*continued("attention", drafts=Drafts(), stream=True), strict=True))
    assert [b"".join(parts) for parts in pieces] == continued("attention", drafts=Drafts())
    assert len(pieces[0]) > 1


@pytest.mark.slow(days=28, group="costly")
def test_draws_have_the_model_s_distribution():
    """Of two bytes among "a" and "b", with drafts of which most are wrong; a bias of a tenth would be seen."""
    options = {"sampling": SamplingConfig(), "alphabet": b"ab", "max_new_bytes": 2}
    found = []
    for seed in range(40):
        found += continued("attention", [b"abababab"] * 12, drafts=Drafts(order=1), seed=seed, **options)
    decoder, params = decoding("attention")
    ids = jnp.asarray([[1, *(byte + OFFSET for byte in b"abababab" + more)] for more in (b"a", b"b")])
    logits = np.asarray(decoder.build().apply({"params": params["model"]}, ids)[0], np.float64)
    choices = [EOS, *(byte + OFFSET for byte in b"ab")]
    p = np.exp(logits[:, -2:, choices])
    p /= p.sum(-1, keepdims=True)
    first = p[0, 0]
    exact = {b"": first[0]}
    for i, byte in enumerate((b"a", b"b")):
        exact |= {byte + more: first[i + 1] * p[i, 1, j] for j, more in enumerate((b"", b"a", b"b"))}

    def chi_square(texts):
        return sum((texts.count(key) - len(texts) * q) ** 2 / (len(texts) * q) for key, q in exact.items())

    assert chi_square(found) < 22.5  # .1 % of 6 degrees of freedom
    biased = [b"ab" if i % 10 == 0 else text for i, text in enumerate(found)]
    assert chi_square(biased) > 22.5


def test_logits_that_are_not_finite_are_told_as_without_drafts():
    _, params = decoding("attention")
    broken = jax.tree.map(lambda x: x.at[(-1,) * x.ndim].set(jnp.nan), params)
    said = []
    for drafts in (None, Drafts()):
        with pytest.raises(
            ValueError, match="logits are not finite: prompt 0, byte 0 after its 0 bytes"
        ) as e:
            continued("attention", params=broken, drafts=drafts)
        said.append(str(e.value))
    assert said[0] == said[1]


ROWS = (b"the cat and the", b"abcabcabc", b"zxy", b"aab aac aac aa", b"a")


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        (Drafts(), (b" cat and", b"abcabcab", b"", b"c aac aa", b"")),
        (Drafts(count=9, order=4), (b"", b"abcabcabc", b"", b"c aac aac", b"")),
        (Drafts(count=3, drafter="counts", order=2), (b" ca", b"abc", b"", b"c a", b"")),
        (Drafts(count=0), (b"",) * 5),
    ],
)
def test_what_is_drafted(drafts, expected):
    history = np.full((5, 24), 3)
    for row, text in zip(history, ROWS, strict=True):
        row[: len(text)] = [byte + OFFSET for byte in text]
    lengths = jnp.asarray([len(row) for row in ROWS], jnp.int32)
    ids, meant = jitted(drafts.arrays, jnp.asarray(history, jnp.int32), lengths)
    found = [
        bytes((np.asarray(row)[:count] - OFFSET).tolist()) for row, count in zip(ids, meant, strict=True)
    ]
    assert found == list(expected)


jitted = jax.jit(draft)


def test_what_is_no_drafts_is_refused():
    with pytest.raises(
        ValueError, match=r"drafts must be a Drafts, such as Drafts\(count=8\), or None, got 8"
    ):
        continued("attention", drafts=8)
    with pytest.raises(ValueError, match="report tells of drafts, and there are none"):
        continued("attention", report=print)
