"""A record's hidden states are its own, and are what the model's logits are made of."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.answers.embed import _row_states
from jaxblt.data.batch import Batch
from jaxblt.data.rows import Span, empty_rows, stream_ids, write_span
from jaxblt.data.sources import BytesSource
from jaxblt.data.vocab import EOS
from jaxblt.models import StackConfig, unstack_periods
from jaxblt.models.hidden import find_layer, hidden_states
from jaxblt.training.step import Task
from tests.answers.runs import (
    BLOCK,
    BYTES,
    LONG,
    ROWS,
    SEQ_LEN,
    SHORT,
    SHORT_HYENA,
    drawn,
    ids_of,
    markov_run,
    random_probabilities,
)
from tests.tolerances import assert_close


def embed(run, sequences, **options):
    return run.embed(sequences, batch_size=ROWS, **options)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_embed")
@pytest.mark.parametrize(("kind", "pool"), [("bytes", "mean"), ("patches", "per_patch")])
def test_alone_batched_and_shuffled_are_equal(runs, kind, pool):
    run = runs[kind]
    together = embed(run, SHORT, pool=pool)
    order = np.random.default_rng(0).permutation(len(SHORT))
    shuffled = embed(run, [SHORT[i] for i in order], pool=pool)
    for place, i in enumerate(order):
        (alone,) = embed(run, [SHORT[i]], pool=pool).arrays
        np.testing.assert_allclose(together.arrays[i], alone, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(shuffled.arrays[place], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_embed")
def test_packed_with_others_is_equal(runs):
    """By the model that takes any segment ids."""
    run, source = runs["bytes"], BytesSource(SHORT)
    arrays = empty_rows(ROWS, SEQ_LEN)
    row = {name: array[0] for name, array in arrays.items()}
    for segment, (i, offset) in enumerate(((0, 0), (1, 2 * BLOCK)), start=1):
        span = Span(i, 0, len(SHORT[i]) + 1, offset, 0)
        write_span(row, stream_ids(source, i, 0, span.stop), span, segment)
    batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    layer = find_layer(run.model, "final")
    read = jax.jit(partial(_row_states, Task(run.model), layer, "per_byte"))
    states, _, _ = read(run.params, run.frozen, batch)
    apart = embed(run, SHORT, pool="per_byte").arrays
    for i, offset in ((0, 0), (1, 2 * BLOCK)):
        found = np.asarray(states)[0, offset + 1 : offset + 1 + len(SHORT[i])]
        np.testing.assert_allclose(found, apart[i], atol=1e-5)


@pytest.mark.slow(days=28, group="costly")
def test_logits_are_read_off_the_final_states(runs):
    """The state behind byte t gives the log-likelihood of byte t + 1, also in the windows of a long record."""
    run = runs["bytes"]
    records = [SHORT[-1], *LONG]
    states = embed(run, records, pool="per_byte").arrays
    nats = run.score(records, per_byte=True, batch_size=ROWS).per_byte
    table = np.asarray(run.params["embedding"]["bytes"], np.float64)
    for record, h, expected in zip(records, states, nats, strict=True):
        assert len(h) == len(record)
        logits = h.astype(np.float64) @ table.T
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = [*ids_of(record[1:]), EOS]
        np.testing.assert_allclose(log_p[np.arange(len(h)), targets], expected[1:], atol=1e-4)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_embed")
def test_pools_are_made_of_the_bytes(runs, tmp_path):
    run = runs["bytes"]
    records = [*SHORT, *LONG]
    states = embed(run, records, pool="per_byte").arrays
    for pool, pooled in (("mean", lambda h: h.mean(0)), ("last", lambda h: h[-1])):
        found = embed(run, records, pool=pool)
        for h, vector in zip(states, found.arrays, strict=True):
            np.testing.assert_allclose(vector, pooled(h), atol=1e-5)
    found.to_npz(tmp_path / "last.npz")
    with np.load(tmp_path / "last.npz") as stored:
        np.testing.assert_array_equal(stored["states"], np.stack(found.arrays))


@pytest.mark.slow(days=28, group="costly", turn="answers/test_embed")
def test_patches_hold_the_bytes_of_the_record_and_nothing_else(runs, tmp_path):
    found = embed(runs["patches"], SHORT, pool="per_patch")
    assert found.layer == 1
    for record, array, lengths in zip(SHORT, found.arrays, found.patch_lengths, strict=True):
        assert array.shape == (len(lengths), 24)
        assert lengths.sum() == len(record)
        assert lengths.min() > 0
    found.to_npz(tmp_path / "states.npz")
    with np.load(tmp_path / "states.npz") as stored:
        assert stored["names"].tolist() == list(found.names)
        start, stop = stored["offsets"][3:5]
        np.testing.assert_array_equal(stored["states"][start:stop], found.arrays[3])
        np.testing.assert_array_equal(stored["patch_lengths"][start:stop], found.patch_lengths[3])


@pytest.mark.slow(days=28, group="costly", turn="answers/test_embed")
def test_layers_are_the_same_scanned_unrolled_and_with_remat():
    """One of the second period, and the last of all, whose output the head's norm takes."""
    mixers = {"S": SHORT_HYENA, "T": SHORT_HYENA}
    stack = StackConfig(dim=16, num_layers=5, pattern="ST", mixers=mixers, mlp_dim=0)
    scanned = dataclasses.replace(BYTES, stack=stack)
    apart = dataclasses.replace(BYTES, stack=dataclasses.replace(stack, scan=False, remat="full"))
    params = drawn(scanned.build())
    ids = jnp.asarray(np.random.default_rng(0).integers(4, 260, (2, BLOCK)), jnp.int32)

    def states(config, params, *layers):
        model = config.build()
        places = [find_layer(model, layer) for layer in layers]
        return jax.jit(lambda p, ids: [hidden_states(model, p, x, ids)[0] for x in places])(params, ids)

    found = states(scanned, params, 2, -1, "final")
    expected = states(apart, {**params, "stack": unstack_periods(params["stack"])}, 2, 4)
    for i, (a, b) in enumerate(zip(found, expected, strict=False)):
        assert_close(a, b, n=64, what=f"layer {i}")
    assert np.abs(np.asarray(found[0] - found[1])).max() > 0.1
    last = np.asarray(found[1], np.float64)
    scale = np.asarray(params["head"]["norm"]["scale"])
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(found[2], normed, atol=1e-4)


def test_bad_choices_are_named(runs):
    run, patched = runs["bytes"], runs["patches"]
    for where, options, message in (
        (run, {"layer": 2}, r"layer must be 'final' or lie in -2..1, the blocks of the model, got 2"),
        (run, {"layer": "last"}, "got 'last'"),
        (run, {"pool": "max"}, "pool must be one of 'mean', 'last', 'per_byte', 'per_patch', got 'max'"),
        (run, {"pool": "per_patch"}, "pool='per_patch' needs a model with patches, got a ByteLM"),
        (
            run,
            {"pool": "per_patch", "layer": 1},
            "does not go with layer 1, whose states are of bytes: use 'per_byte'",
        ),
        (patched, {"pool": "per_byte", "layer": 1}, "layer 1, whose states are of patches: use 'per_patch'"),
        (markov_run(random_probabilities()), {}, "model Markov does not name its stacks"),
    ):
        with pytest.raises(ValueError, match=message):
            where.embed([b"A"], **options)
    with pytest.raises(
        ValueError, match="record '0' of 99 bytes is longer than a row of window = 64 positions"
    ):
        patched.embed([b"A" * 99], pool="per_patch")
    with pytest.raises(ValueError, match="record '1' is empty"):
        run.embed([b"A", b""])
    broken = {
        **run.params,
        "embedding": {"bytes": run.params["embedding"]["bytes"].at[ids_of(b"B")[0]].set(jnp.nan)},
    }
    with pytest.raises(
        ValueError, match="states of record '1' are not finite; parameters model/embedding/bytes"
    ):
        dataclasses.replace(run, params=broken).embed([b"A", b"ABA"], batch_size=ROWS)
