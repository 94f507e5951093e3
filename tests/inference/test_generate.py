"""Decoding from caches equals the parallel pass; sampling; independent rows."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.data.vocab import EOS
from jaxblt.inference import (
    Decoder,
    SamplingConfig,
    decode_step,
    generate,
    init_decoder,
    sample,
)
from jaxblt.inference.sampling import alphabet_table, sampling_arrays
from jaxblt.mixers import AttentionConfig
from jaxblt.mixers.driver.sequence import splits_call
from jaxblt.models import BLTConfig, ByteLMConfig, HashConfig, StackConfig, init_byte_lm_state
from jaxblt.parallel import make_mesh
from jaxblt.patching import PatcherConfig, byte_entropies, decided, make_patches
from jaxblt.random_keys import make_key
from jaxblt.testing.collectives import collectives
from tests.inference.forced import teacher_force
from tests.mixer_table import table
from tests.parameters import drawn
from tests.tolerances import tol

HEADS = AttentionConfig(dim=16, num_heads=2)
LOCAL = StackConfig(dim=16, num_layers=1, pattern="W", mlp_dim=0, mixers=table(attention=HEADS, window=8))
ENTROPY = ByteLMConfig(stack=LOCAL)
MODEL = BLTConfig(
    encoder=LOCAL,
    latent=StackConfig(dim=16, num_layers=2, pattern="HA", mlp_dim=24, mixers=table(attention=HEADS)),
    decoder=LOCAL,
    hash=HashConfig(sizes=(3,), table_size=64),
    bridge_heads=2,
)
GREEDY = SamplingConfig(temperature=0)
PATCHER = PatcherConfig(mode="entropy", threshold=5.2, block_size=32, capacity=24)
ROOMY = dataclasses.replace(PATCHER, capacity=32)


PROMPTS = [b"abc", b"a longer prompt, of more than a block of bytes"]


def greedy(decoder, params, prompts):
    """30 bytes each; two prompts, of which one is as long as the longer of `PROMPTS`, take the programs of others."""
    return generate(decoder, params, prompts, max_new_bytes=30, sampling=GREEDY)


def unboxed(config, *inputs, **options):
    return drawn(config.build(), *inputs, **options)["params"]


@pytest.fixture(scope="module")
def trained():
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, 80)), jnp.int32)
    patches = jax.eval_shape(partial(make_patches, PATCHER), ids, entropies=jnp.zeros(ids.shape))
    return {"model": unboxed(MODEL, ids, patches=patches), "entropy": unboxed(ENTROPY, ids)}, ids


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_bytes_one_by_one_equal_the_parallel_pass(trained):
    params, ids = trained
    segments = jnp.ones_like(ids)
    decoder = Decoder(MODEL, PATCHER, ENTROPY)
    logits, closed = jax.jit(lambda p, i, s: teacher_force(decoder, p, i, s))(params, ids, segments)
    build = ENTROPY.build()
    measure = partial(byte_entropies, lambda p, i, **o: build.apply({"params": p}, i, **o))
    entropies = jax.jit(measure)(params["entropy"], ids)
    patches = jax.jit(partial(make_patches, PATCHER))(ids, entropies=entropies)
    sure = jax.jit(partial(decided, PATCHER, error=1e-4))(entropies, segments)
    assert np.asarray(sure).all()
    np.testing.assert_array_equal(np.asarray(closed), np.asarray(patches.closed).reshape(2, -1)[:, :80])
    assert 5 < int(jnp.sum(closed)) < 155
    whole, _ = jax.jit(MODEL.build().apply)({"params": params["model"]}, ids, patches=patches)
    np.testing.assert_allclose(np.asarray(logits), np.asarray(whole), **tol(jnp.float32, 1024))


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_a_row_does_not_depend_on_its_neighbours(trained):
    params, _ = trained
    decoder = Decoder(MODEL, ROOMY, ENTROPY)
    one, other = greedy(decoder, params, PROMPTS), greedy(decoder, params, [PROMPTS[1], b"another"])
    assert one[1] == other[0]
    assert len(one[0]) == 30


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_a_byte_model_generates_the_argmax_of_its_parallel_pass():
    prompt = b"0123"
    ids = jnp.asarray([[1, *(b + 4 for b in prompt)]], jnp.int32)
    params = unboxed(ENTROPY, ids)
    [text] = generate(Decoder(ENTROPY), {"model": params}, [prompt], max_new_bytes=6, sampling=GREEDY)
    assert len(text) == 6
    ids = jnp.concatenate([ids, jnp.asarray([[b + 4 for b in text]], jnp.int32)], 1)
    logits = np.array(jax.jit(ENTROPY.build().apply)({"params": params}, ids)[0])[0, len(prompt) : -1]
    logits[:, NEVER_DRAWN] = -np.inf
    assert text == bytes(int(i) - 4 for i in logits.argmax(-1))


def expect_the_bytes_of_one_device(decoder, params, prompts):
    """Greedy bytes on a mesh that splits the sequence; a step exchanges partial results alone, and keeps its parts."""
    expected, ids = greedy(decoder, params, prompts), jnp.ones(len(prompts), jnp.int32)
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        assert greedy(decoder, params, prompts) == expected
        state = init_decoder(decoder, len(prompts), num_bytes=90)
        step = jax.jit(partial(decode_step, decoder)).lower(params, ids, state, ids).compile()
        after = step(params, ids, state, ids)[2]
    assert {c.kind for c in collectives(step)} == {"all-reduce"}
    caches = [
        leaf for leaf in jax.tree.leaves(after) if leaf.ndim == 5 and leaf.shape[2] > LOCAL.mixers["W"].window
    ]
    assert len(caches) == 2
    for cache in caches:
        assert {shard.data.shape[2] for shard in cache.addressable_shards} == {cache.shape[2] // 4}


@pytest.mark.parametrize("config", [MODEL, dataclasses.replace(ENTROPY, hash=HashConfig(sizes=(3,)))])
def test_a_fresh_state_can_be_donated(config):
    """No buffer is used for two leaves; the donated buffers are gone."""
    patched = config is MODEL
    decoder = Decoder(config, PATCHER if patched else None, ENTROPY if patched else None)
    state = init_decoder(decoder, 2, num_bytes=40)
    leaves = jax.tree.leaves(state)
    flip = jax.jit(lambda state: jax.tree.map(lambda x: x[::-1], state), donate_argnums=0)
    jax.block_until_ready(flip(state))
    assert all(leaf.is_deleted() for leaf in leaves)


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_model_s_caches_split_over_the_sequence():
    config = ByteLMConfig(stack=dataclasses.replace(LOCAL, num_layers=2, pattern="HA"))
    params = {"model": unboxed(config, jnp.ones((1, 8), jnp.int32))}
    expect_the_bytes_of_one_device(Decoder(config), params, PROMPTS)


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_patched_model_s_caches_split_over_the_sequence(trained):
    """Its prompts close blocks, whose unused slots the latent stack passes over."""
    expect_the_bytes_of_one_device(Decoder(MODEL, ROOMY, ENTROPY), trained[0], PROMPTS)


@pytest.mark.slow(days=28, group="decoding")
def test_a_byte_model_takes_a_prompt_split_over_the_sequence():
    stack = dataclasses.replace(LOCAL, num_layers=3, pattern="HAW")
    config, prompt = ByteLMConfig(stack=stack, hash=HashConfig(sizes=(3,), table_size=64)), 256
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, prompt + 2)), jnp.int32)
    model, params = config.build(), {"params": unboxed(config, ids)}
    stream, logits = jax.jit(partial(model.apply, method="stream")), []
    with jax.set_mesh(make_mesh(data=1, seq=4, devices=jax.devices()[:4])):
        assert splits_call(prompt)
        state = init_byte_lm_state(config, 2, capacity=prompt + 2)
        for part in (ids[:, :prompt], ids[:, prompt:-1], ids[:, -1:]):
            y, state = stream(params, part, state)
            logits.append(np.asarray(y))
    expected, _ = jax.jit(model.apply)(params, ids)
    np.testing.assert_allclose(np.concatenate(logits, 1), np.asarray(expected), **tol(jnp.float32, 1024))


draw = jax.jit(sample, static_argnums=0)


def test_sampling_keeps_to_top_k_and_top_p():
    logits = jnp.log(jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.5, 0.3, 0.15, 0.05]) + 1e-9)[None].repeat(400, 0)
    keys = jax.random.split(jax.random.key(0), 400)
    configs = {SamplingConfig(top_k=2): {4, 5}, SamplingConfig(top_p=0.9): {4, 5, 6}, GREEDY: {4}}
    for config, kept in configs.items():
        assert set(np.asarray(draw(config, keys, logits)).tolist()) == kept


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_equal_logits_leave_exactly_k_and_the_fewest():
    logits = jnp.zeros((300, 260)).at[:, 100:103].set(1.0)
    keys = jax.random.split(make_key(0), 300)
    configs = {
        SamplingConfig(top_k=1): [100],
        SamplingConfig(top_k=2): [100, 101],
        SamplingConfig(top_p=1e-3): [100],
    }
    for config, kept in configs.items():
        assert sorted(set(np.asarray(draw(config, keys, logits)).tolist())) == kept


def test_ids_are_sorted_only_if_a_row_cuts_them():
    """Rows that cut nothing are drawn alike beside one that does, also where logits are not finite."""
    keys, logits = jax.random.split(make_key(0), 8), jax.random.normal(make_key(1), (8, 260))
    logits = logits.at[3, 7].set(jnp.nan).at[4, 8:10].set(jnp.inf).at[5].set(-jnp.inf)
    plain = [SamplingConfig(temperature=t) for t in (1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.01, 1.0)]
    beside, program = sampling_arrays([*plain[:-1], SamplingConfig(top_k=2)]), jax.jit(sample)
    found, known = (program(setting, keys, logits)[:-1] for setting in (sampling_arrays(plain), beside))
    np.testing.assert_array_equal(found, known)
    equations = jax.make_jaxpr(sample)(beside, keys, logits).jaxpr.eqns
    assert {" sort[" in str(e) for e in equations if e.primitive.name == "cond"} == {True}
    assert not any(" sort[" in str(e) for e in equations if e.primitive.name != "cond")


@pytest.mark.slow(days=28, group="costly")
def test_an_alphabet_is_kept_to_and_holds_eos():
    logits, keys = jnp.zeros((300, 260)).at[:, 70].set(30.0), jax.random.split(make_key(0), 300)
    table = alphabet_table([b"ACGT"] * 300)
    for config, most in ((SamplingConfig(), 5), (SamplingConfig(top_k=2), 2), (GREEDY, 1)):
        drawn = set(np.asarray(draw(config, keys, logits, alphabet=table)).tolist())
        assert len(drawn) == most
        assert drawn <= {EOS, *(byte + 4 for byte in b"ACGT")}


NEVER_DRAWN = (0, 1, 3)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
@pytest.mark.parametrize(
    "config",
    [
        GREEDY,
        SamplingConfig(),
        SamplingConfig(temperature=1e-6),
        SamplingConfig(temperature=1e6),
        SamplingConfig(top_k=7),
        SamplingConfig(top_k=400),
        SamplingConfig(top_p=1e-6),
        SamplingConfig(top_p=0.5, top_k=3),
    ],
    ids=str,
)
def test_boe_bos_and_pad_are_never_drawn(config):
    """Whatever the other ids' logits; a number that is finite in fp32 stays so, and the rare is not drawn."""
    huge = float(np.finfo(np.float32).max)
    others = np.array([-np.inf, np.nan, np.inf, -huge, -1e30, 0.0, huge], np.float32)
    logits = np.repeat(others[:, None], 8, 1).repeat(30, 0)
    logits[:, NEVER_DRAWN] = huge
    logits[-30:, 5] = -huge
    drawn = np.asarray(draw(config, jax.random.split(jax.random.key(0), len(logits)), jnp.asarray(logits)))
    assert not np.isin(drawn, NEVER_DRAWN).any()
    assert ((drawn >= 0) & (drawn < 8)).all()
    assert (drawn[-30:] != 5).all()


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_ids_beyond_the_bytes_are_never_drawn():
    """A vocabulary may be larger, as SimplePulse's is: a document of bytes holds none of its further ids."""
    logits = jnp.zeros((30, 10_000)).at[:, 300].set(1e30)
    for config in (GREEDY, SamplingConfig()):
        drawn = np.asarray(draw(config, jax.random.split(jax.random.key(0), 30), logits))
        assert drawn.max() < 260


@pytest.fixture(scope="module")
def byte_model():
    """With a head of its own, so that NaN in the embedding of a byte reaches only the rows that hold the byte."""
    config = dataclasses.replace(ENTROPY, tie_head=False)
    return Decoder(config), {"model": unboxed(config, jnp.ones((1, 8), jnp.int32))}


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_a_request_is_drawn_alike_in_any_company(byte_model):
    write = partial(generate, *byte_model, max_new_bytes=9)
    first, second, third = write([b"ab", b"a longer prompt", b"ab"], seed=[7, 8, 9])
    assert len({first, third}) == 2
    assert write([b"ab", b"ab", b"a longer prompt"], seed=[9, 7, 8]) == [third, first, second]
    [alone] = write([b"ab"], seed=7)
    assert alone == first
    [going_on] = write([b"ab" + first[:4]], seed=7)
    assert going_on[:5] == first[4:9]
    with jax.default_prng_impl("rbg"):
        assert write([b"ab"], seed=7) == [first]
    one_seed = write([b"ab", b"ab", b"ab"], seed=7)
    assert one_seed[0] == first
    assert len(set(one_seed)) == 3


@pytest.mark.slow(days=28, group="costly")
def test_parameters_in_boxes_and_an_alphabet_for_each_are_taken(byte_model):
    decoder, params = byte_model
    shapes = jax.eval_shape(decoder.build().init, make_key(0), jnp.ones((1, 8), jnp.int32))["params"]
    boxed = {"model": jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(params["model"]))}
    write = partial(generate, decoder, max_new_bytes=9, seed=[7, 8, 9])
    prompts = [b"ab", b"a longer prompt", b"ab"]
    assert write(boxed, prompts) == write(params, prompts)
    texts = write(params, prompts, alphabet=[b"ACGT", b"x", None])
    assert [set(text) <= set(kept) for text, kept in zip(texts, (b"ACGT", b"x"), strict=False)] == [
        True,
        True,
    ]
    assert texts[2] == write(params, prompts)[2]


def with_nan(params, *path, row=None):
    """The parameters with NaN in one leaf, or in one row of it."""
    params = jax.tree.map(lambda leaf: leaf, params)
    inner = params
    for name in path[:-1]:
        inner = inner[name]
    leaf = np.array(inner[path[-1]])
    leaf[slice(None) if row is None else row] = np.nan
    inner[path[-1]] = jnp.asarray(leaf)
    return params


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_logits_that_are_not_finite_name_prompt_byte_and_parameters(byte_model):
    decoder, params = byte_model
    where = ("model", "embedding", "bytes")
    write = partial(generate, decoder, max_new_bytes=9, seed=[7, 8, 9])
    prompts = [b"ab", b"a longer prompt", b"ab"]
    names = "parameters model/embedding/bytes hold NaN or inf"
    with pytest.raises(ValueError, match=f"prompt 1, byte 0 after its 15 bytes; {names}"):
        write(with_nan(params, *where, row=ord("p") + 4), prompts)
    text = write(params, prompts)[0]
    assert text[3] not in b"ab"
    read = text.index(text[3]) + 1
    with pytest.raises(ValueError, match=f"prompt 0, byte {read} after its 2 bytes; {names}"):
        write(with_nan(params, *where, row=text[3] + 4), prompts)


@pytest.mark.slow(days=28, group="costly", turn="inference/test_generate")
def test_entropies_that_are_not_finite_are_an_error_too(trained):
    """They cut no patch, and the model's own logits stay finite."""
    params, _ = trained
    decoder = Decoder(MODEL, ROOMY, ENTROPY)
    broken = with_nan(params, "entropy", "embedding", "bytes", row=ord("p") + 4)
    with pytest.raises(ValueError, match=r"prompt 0, byte 0 .* parameters entropy/embedding/bytes hold"):
        greedy(decoder, broken, PROMPTS)


def test_errors():
    with pytest.raises(ValueError, match="cannot generate"):
        Decoder(dataclasses.replace(ENTROPY, stack=dataclasses.replace(LOCAL, causal=False)))
    with pytest.raises(ValueError, match="sees the future"):
        Decoder(MODEL, dataclasses.replace(PATCHER, mode="optimal"), ENTROPY)
    with pytest.raises(ValueError, match="needs an entropy model"):
        Decoder(MODEL, PATCHER)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": ["abc"]}, r"prompt 0 must be bytes, got 'abc': call its encode\(\)"),
        ({"prompts": [b"a", 7]}, "prompt 1 must be bytes, got 7: make it bytes"),
        ({"prompts": b"abc"}, "prompts must be a list of bytes, got b'abc': put it in a list"),
        ({"prompts": None}, r"prompts must be a list of bytes, got None: \[b''\] starts a new document"),
        ({"prompts": "abc"}, "prompts must be a list of bytes, got 'abc'"),
        ({"max_new_bytes": 0}, "max_new_bytes must be an integer from 1 to 2147483647, got 0"),
        ({"max_new_bytes": 2.5}, "max_new_bytes must be an integer from 1 to 2147483647, got 2.5"),
        ({"max_new_bytes": 2**31}, "max_new_bytes must be an integer from 1 to 2147483647, got 2147483648"),
        ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ({"seed": [1, 2]}, "one for each of the 1 prompts, got 2"),
        ({"seed": None}, "seed must be an integer from 0 to 4294967295, got None"),
        ({"alphabet": b""}, "alphabet must be bytes such as b'ACGT', or None for all, got b''"),
        ({"alphabet": "ACGT"}, "alphabet must be bytes such as b'ACGT', or None for all, got 'ACGT'"),
        ({"alphabet": [b"A", b"C"]}, "alphabet must be bytes, or one for each of the 1 prompts, got 2"),
        ({"seed": [0.5]}, "seed must be an integer from 0 to 4294967295, got 0.5"),
    ],
)
def test_requests_that_cannot_be_met(changes, words):
    with pytest.raises(ValueError, match=words):
        generate(Decoder(ENTROPY), {}, **({"prompts": [b"abc"], "max_new_bytes": 3} | changes))
