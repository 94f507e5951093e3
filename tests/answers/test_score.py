"""A record's log-likelihood is its own: alone, batched, shuffled and packed, on both strands, at any length."""

import dataclasses
import gzip
import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.answers import build_index, reading
from jaxblt.answers.score import _target_nats, scoring_reader
from jaxblt.data import make_dataset
from jaxblt.data.batch import Batch
from jaxblt.data.rows import Span, empty_rows, stream_ids, write_span
from jaxblt.data.sources import BytesSource, Regions, reverse_complement, whole
from jaxblt.data.vocab import BOS, EOS
from jaxblt.mixers import MACConfig
from jaxblt.models import ByteLMConfig
from jaxblt.training.objectives.objectives import Masked
from jaxblt.training.start.setup import entropy_history
from jaxblt.training.step import Task
from tests.answers.runs import (
    BLOCK,
    LONG,
    NEAR,
    ROWS,
    SEQ_LEN,
    SHORT,
    ids_of,
    make_run,
    markov_run,
    random_probabilities,
)


def score(run, sequences, **options):
    return run.score(sequences, batch_size=ROWS, **options)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_score")
def test_alone_batched_and_shuffled_are_equal(run):
    together = score(run, SHORT, per_byte=True)
    order = np.random.default_rng(0).permutation(len(SHORT))
    shuffled = score(run, [SHORT[i] for i in order])
    alone = [score(run, [record]).log_likelihood[0] for record in SHORT]
    np.testing.assert_allclose(together.log_likelihood, alone, rtol=1e-6)
    np.testing.assert_allclose(together.log_likelihood[order], shuffled.log_likelihood, rtol=1e-6)
    assert len({round(x, 3) for x in alone}) == len(SHORT)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_score")
def test_packed_with_others_is_equal(run):
    """Two or three records a row, by the model that takes any segment ids."""
    reader, source = scoring_reader(run, window=None, batch_size=ROWS), BytesSource(SHORT)
    arrays, places = empty_rows(ROWS, SEQ_LEN), []
    for row, documents in enumerate(((0, 1), (2, 3), (4, 0, 2))):
        offset = 0
        for segment, i in enumerate(documents, start=1):
            span = Span(i, 0, len(SHORT[i]) + 1, offset, 0)
            write_span(
                {n: a[row] for n, a in arrays.items()}, stream_ids(source, i, 0, span.stop), span, segment
            )
            places.append((row, span))
            offset += -(-span.stop // BLOCK) * BLOCK
    batch = Batch(**{name: jnp.asarray(array) for name, array in arrays.items()})
    task = Task(run.model, entropy_model=run.entropy_model)
    packed, _ = _target_nats(task, reader.params, reader.frozen, batch)
    apart = score(run, SHORT, per_byte=True).per_byte
    for row, span in places:
        found = np.asarray(packed)[row, span.offset : span.offset + span.stop]
        np.testing.assert_allclose(found, apart[span.document], rtol=1e-5)


@pytest.mark.slow(days=28, group="costly")
def test_a_model_that_needs_records_on_a_grid_scores_them():
    """MAC refuses documents that may start anywhere; a record read by itself starts a row, whatever is behind it."""
    mac = MACConfig(dim=16, num_heads=2, chunk_size=4, depth=1)
    run = make_run(ByteLMConfig(stack=dataclasses.replace(NEAR, pattern="C", mixers={"C": mac})))
    found = score(run, [b"abcdefgh", b"abcdefgh, and more"], per_byte=True).per_byte
    np.testing.assert_allclose(found[0][:-1], found[1][: len(found[0]) - 1], rtol=1e-5)


def test_sums_and_bits_are_those_of_the_bytes(run):
    kept, summed = score(run, SHORT, per_byte=True), score(run, SHORT)
    assert summed.per_byte is None
    assert [len(nats) for nats in kept.per_byte] == [len(record) + 1 for record in SHORT]
    np.testing.assert_allclose(kept.log_likelihood, [x.sum() for x in kept.per_byte], rtol=1e-12)
    np.testing.assert_allclose(summed.log_likelihood, kept.log_likelihood, rtol=1e-12)
    np.testing.assert_allclose(kept.bits_per_byte * kept.scored * -math.log(2), kept.log_likelihood)
    np.testing.assert_array_equal(kept.scored, kept.lengths + 1)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_score")
def test_long_records_are_scored_in_the_windows_of_evaluation(runs):
    """The pipeline makes its rows by itself: same first bytes, EOS, and the whole record's entropies."""
    run = runs["patches"]
    data = dataclasses.replace(run.recipe.data, context=SEQ_LEN // 2, batch_size=ROWS)
    rows = make_dataset(data, split="all", mode="eval", source=BytesSource(LONG))
    rows = dataclasses.replace(rows, history=entropy_history(run.recipe))
    reader, expected, count = scoring_reader(run, window=None, batch_size=ROWS), 0.0, 0
    for index in range(rows.num_batches):
        batch = jax.tree.map(jnp.asarray, rows.batch(index))
        nats, _ = _target_nats(reader.task, reader.params, reader.frozen, batch)
        expected += float(jnp.sum(nats * batch.loss_mask.astype(jnp.float32)))
        count += int(batch.loss_mask.sum())
    found = score(run, LONG, per_byte=True)
    assert found.scored.sum() == count
    np.testing.assert_allclose(found.log_likelihood.sum(), expected, rtol=1e-5)
    np.testing.assert_allclose(found.log_likelihood, [x.sum() for x in found.per_byte], rtol=1e-12)


def by_hand(p, record, eos):
    ids = [BOS, *ids_of(record), *([EOS] if eos else [])]
    return np.array([math.log(p[a, b]) for a, b in pairwise(ids)])


@pytest.mark.parametrize("eos", [True, False])
def test_every_byte_and_eos_count_once_in_every_bucket_and_window(monkeypatch, eos):
    monkeypatch.setattr(reading, "SHORTEST", 16)
    assert reading.bucket_lengths(SEQ_LEN) == [16, 32, SEQ_LEN]
    p = random_probabilities()
    records = [*SHORT, *(b"x" * n for n in (1, 15, 16, 17, 63, 64, 65, 128, 500))]
    found = score(markov_run(p, eos=eos), records, per_byte=True)
    for nats, record in zip(found.per_byte, records, strict=True):
        np.testing.assert_allclose(nats, by_hand(p, record, eos), rtol=1e-4)


def test_eos_follows_only_where_a_text_ends():
    p = random_probabilities()
    source = BytesSource([b"abcdef"])
    parts = Regions(source, np.array([0, 0]), np.array([0, 3]), np.array([3, 6]))
    found = score(markov_run(p), parts)
    np.testing.assert_array_equal(found.scored, [3, 4])
    assert found.names == ("0[0:3]", "0[3:6]")
    expected = [by_hand(p, b"abc", False).sum(), by_hand(p, b"def", True).sum()]
    np.testing.assert_allclose(found.log_likelihood, expected, rtol=1e-5)


def test_both_strands_are_the_mean_of_the_two():
    run = markov_run(random_probabilities(), eos=False)
    records = [b"ACGTTGCANNRYacgtn" * 5, b"GATTACA"]
    both, forward = score(run, records, both_strands=True, per_byte=True), score(run, records, per_byte=True)
    reverse = score(run, [reverse_complement(r) for r in records], per_byte=True)
    mean = (forward.log_likelihood + reverse.log_likelihood) / 2
    np.testing.assert_allclose(both.log_likelihood, mean, rtol=1e-12)
    for found, f, r in zip(both.per_byte, forward.per_byte, reverse.per_byte, strict=True):
        np.testing.assert_allclose(found, (f + r[::-1]) / 2, rtol=1e-12)
    np.testing.assert_allclose(score(run, records, both_strands=True).log_likelihood, mean, rtol=1e-12)
    ended = markov_run(random_probabilities(), eos=True)
    (nats,) = score(ended, [b"GATTACA"], both_strands=True, per_byte=True).per_byte
    (there,) = score(ended, [b"GATTACA"], per_byte=True).per_byte
    (back,) = score(ended, [b"TGTAATC"], per_byte=True).per_byte
    np.testing.assert_allclose(nats, (there + np.append(back[6::-1], back[7])) / 2, rtol=1e-12)


def test_files_keep_their_names_and_the_case_that_the_run_was_trained_on(tmp_path):
    p = random_probabilities()
    fasta = tmp_path / "genes.fa.gz"
    fasta.write_bytes(gzip.compress(b">one first\nACgtN\nAC\n>two\nGG\n"))
    run = markov_run(p, kind="fasta", paths=("genes.fa",))
    found = score(run, fasta)
    assert found.names == ("one", "two")
    expected = [by_hand(p, b"ACgtNAC", False).sum(), by_hand(p, b"GG", False).sum()]
    np.testing.assert_allclose(found.log_likelihood, expected, rtol=1e-5)
    raised = markov_run(p, kind="fasta", paths=("genes.fa",), soft_mask="upper")
    np.testing.assert_allclose(
        score(raised, fasta).log_likelihood[0], by_hand(p, b"ACGTNAC", False).sum(), rtol=1e-5
    )
    text = tmp_path / "note.txt"
    text.write_bytes(b"AC\n")
    scores = score(run, str(text), per_byte=True)
    assert scores.names == (str(text),)
    scores.to_tsv(tmp_path / "new" / "out.tsv")
    header, row = (tmp_path / "new" / "out.tsv").read_text().splitlines()
    assert header.split("\t") == ["name", "length", "scored", "log_likelihood", "bits_per_byte", "per_byte"]
    assert row.split("\t")[:3] == [str(text), "3", "3"]
    assert float(row.split("\t")[3]) == pytest.approx(scores.log_likelihood[0], rel=1e-8)
    assert [float(x) for x in row.split("\t")[5].split(",")] == pytest.approx(scores.per_byte[0], rel=1e-8)


def test_bad_input_is_named(tmp_path):
    run = markov_run(random_probabilities())
    empty = tmp_path / "empty.fa.gz"
    empty.write_bytes(gzip.compress(b""))
    reads = tmp_path / "reads.FQ.gz"
    reads.write_bytes(gzip.compress(b"@r\nAC\n+\nII\n"))
    for sequences, message in (
        ([], "no sequences were given"),
        ([b"A", b""], r"record '1' is empty \(0 bytes\)"),
        (b"ACGT", "sequences must be a list of bytes, a path or a DocumentSource, got b'ACGT'"),
        ([b"A", 3], "sequence 1 must be bytes or text, got 3"),
        (
            [b"A", "AC\ud800"],
            "sequence 1 holds a lone surrogate at character 2, which has no bytes: make it bytes",
        ),
        (whole(BytesSource([b"A"]), np.array([], np.int64)), "no sequences"),
        (empty, "empty.fa.gz' is empty"),
        (
            reads,
            "reads.FQ.gz' ends in .fq, and its reads would be one record with their qualities: write it as FASTA",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run.score(sequences)
    with pytest.raises(
        FileNotFoundError, match=r"does not exist: 'ACGT'.*a sequence itself goes into a list"
    ):
        run.score("ACGT")
    with pytest.raises(ValueError, match=r"record '1' has byte b'U' at position 2, which has no complement"):
        run.score([b"ACGT", b"ACUU"], both_strands=True)
    for option in ("window", "batch_size"):
        with pytest.raises(ValueError, match=f"{option} must be at least"):
            run.score([b"A"], **{option: 0})
    guessing = dataclasses.replace(
        run.recipe, model=dataclasses.replace(run.recipe.model, causal=False), objective=Masked()
    )
    with pytest.raises(ValueError, match="run 'tiny' was trained with objective Masked, expected NextByte"):
        dataclasses.replace(run, recipe=guessing).score([b"A"])


@pytest.mark.parametrize("name", ["a.gb", "a.csv.gz", "calls.VCF", "genes.gff3"])
def test_names_and_numbers_of_a_file_are_no_bases(name, tmp_path):
    """A run on FASTA refuses what would count as one record with its columns; a run on text reads every file."""
    file = tmp_path / name
    data = b"LOCUS       A 4 bp DNA\nORIGIN\n        1 acgt\n//\n"
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
    genes = markov_run(random_probabilities(), kind="fasta", paths=("genes.fa",))
    with pytest.raises(
        ValueError, match="and would be read as one record, its names and numbers too: give its"
    ):
        genes.score(file)
    assert markov_run(random_probabilities()).score(file).lengths.tolist() == [len(data)]


def test_logits_that_are_not_finite_name_record_and_byte():
    run = markov_run(random_probabilities())
    logits = run.params["logits"].at[ord("G") + 4, ord("T") + 4].set(jnp.nan)
    broken = dataclasses.replace(run, params={"logits": logits})
    with pytest.raises(ValueError, match="record '1' is nan at byte 4; parameters model/logits hold NaN"):
        broken.score([b"ACTA", b"ACAGA"], batch_size=ROWS)


def test_entropies_that_are_not_finite_are_an_error(runs):
    """They cut no patch, and the logits stay finite."""
    run = runs["patches"]
    frozen = {
        "entropy": run.frozen["entropy"].replace(
            params=jax.tree.map(lambda x: x * jnp.nan, run.frozen["entropy"].params)
        )
    }
    with pytest.raises(ValueError, match="record '0' is nan at byte 0; parameters entropy/"):
        dataclasses.replace(run, frozen=frozen).score(SHORT, batch_size=ROWS)


def test_no_method_fetches_what_the_config_names(runs):
    run = runs["patches"]
    data = dataclasses.replace(run.recipe.data, paths=("https://elsewhere.example/a.txt",))
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, data=data))
    for call in (run.evaluate, run.recalibrate, lambda: build_index(run)):
        with pytest.raises(ValueError, match=r"the run's config names https://elsewhere\.example/a\.txt"):
            call()
