"""Records are read in the case of the run's data, and only the characters that it learned count."""

import dataclasses
import sys

import numpy as np
import pytest

from tests.answers.runs import ROWS, markov_run, random_probabilities
from tests.answers.test_score import by_hand

DNA = {"kind": "fasta", "paths": ("genome.fa",), "soft_mask": "upper", "scored": "ACGT", "eos": False}
BASES = b"GATTACAGCC"


@pytest.fixture(scope="module")
def dna():
    return markov_run(random_probabilities(), **DNA)


def score(run, records, **options):
    return run.score(records, batch_size=ROWS, **options)


def test_bytes_that_were_not_learned_do_not_count(dna):
    """300 N before 400 bases made 4.61 bits a base of 1.94, and lower case 8.22 of 1.96, under a trained run."""
    p = random_probabilities()
    records = [BASES, b"N" * 30 + BASES, BASES.lower(), b"NNNN", BASES[:3] + b"-" + BASES[3:]]
    for kept in (False, True):
        found = score(dna, records, per_byte=kept)
        np.testing.assert_array_equal(found.scored, [10, 10, 10, 0, 10])
        np.testing.assert_array_equal(found.lengths, [10, 40, 10, 4, 11])
        behind = by_hand(p, records[1], False)[30:]
        np.testing.assert_allclose(
            found.log_likelihood[:2], [by_hand(p, BASES, False).sum(), behind.sum()], rtol=1e-5
        )
        np.testing.assert_allclose(found.log_likelihood[2], found.log_likelihood[0])
        np.testing.assert_allclose(found.bits_per_byte[1], -behind.sum() / 10 / np.log(2), rtol=1e-5)
        assert np.isnan(found.bits_per_byte[3])
    assert np.isnan(found.per_byte[1][:30]).all()
    np.testing.assert_allclose(found.per_byte[1][30:], behind, rtol=1e-4)


def test_every_byte_counts_if_asked(dna):
    p, record = random_probabilities(), b"NN" + BASES.lower()
    found = score(dna, [record], as_trained=False)
    np.testing.assert_allclose(found.log_likelihood, [by_hand(p, record, False).sum()], rtol=1e-5)
    assert found.scored[0] == 12
    with pytest.raises(ValueError, match=r"no byte of the records is one of scored='ACGT'.*as_trained=False"):
        score(dna, [b"NNN", b"-"])


def test_both_strands_count_the_same_bytes(dna):
    both = score(dna, [b"NN" + BASES], both_strands=True)
    forward, reverse = score(dna, [b"NN" + BASES]), score(dna, [b"GGCTGTAATCNN"])
    np.testing.assert_allclose(both.log_likelihood, (forward.log_likelihood + reverse.log_likelihood) / 2)
    data = dataclasses.replace(dna.recipe.data, scored="AC")
    uneven = dataclasses.replace(dna, recipe=dataclasses.replace(dna.recipe, data=data))
    with pytest.raises(ValueError, match="scored='AC' has characters whose complement is not scored"):
        score(uneven, [BASES], both_strands=True)


def test_files_are_raised_as_lists_are(dna, tmp_path):
    (tmp_path / "g.txt").write_bytes(BASES.lower())
    (tmp_path / "g.jsonl").write_bytes(b'{"text": "%s"}\n' % BASES.lower())
    expected = score(dna, [BASES]).log_likelihood
    for name in ("g.txt", "g.jsonl"):
        np.testing.assert_allclose(score(dna, tmp_path / name).log_likelihood, expected)


def test_windows_of_variants_count_what_was_learned(dna, tmp_path):
    p = random_probabilities()
    (tmp_path / "g.fa").write_text(">one\nnnACgtaNN\n")
    (tmp_path / "v.vcf").write_text("one\t5\t.\tG\tT\n")
    found = dna.variants(tmp_path / "v.vcf", tmp_path / "g.fa", context=9, batch_size=ROWS)
    ref, alt = (by_hand(p, window, False)[2:7].sum() for window in (b"NNACGTANN", b"NNACTTANN"))
    np.testing.assert_allclose(found.score_forward, alt - ref, atol=1e-5)
    plain = dna.variants(tmp_path / "v.vcf", tmp_path / "g.fa", context=9, batch_size=ROWS, as_trained=False)
    ref, alt = (by_hand(p, window, False).sum() for window in (b"nnACgtaNN", b"nnACttaNN"))
    np.testing.assert_allclose(plain.score_forward, alt - ref, atol=1e-5)


def test_means_are_taken_over_what_was_learned(runs):
    run = runs["bytes"]
    data = dataclasses.replace(run.recipe.data, **DNA)
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, data=data))
    record = b"nnn" + BASES.lower()
    (states,) = run.embed([record], pool="per_byte", batch_size=ROWS).arrays
    assert len(states) == 13
    (mean,) = run.embed([record], batch_size=ROWS).arrays
    np.testing.assert_allclose(mean, states[3:].mean(0), atol=1e-5)
    (raised,) = run.embed([record.upper()], pool="per_byte", batch_size=ROWS, as_trained=False).arrays
    np.testing.assert_allclose(states, raised, atol=1e-6)
    with pytest.raises(ValueError, match="record '1' holds none of scored='ACGT'"):
        run.embed([BASES, b"NN"], batch_size=ROWS)


def test_prompts_are_read_in_the_runs_case(dna, monkeypatch):
    asked = []

    def generate(decoder, params, prompts, **options):
        asked.append(prompts)
        return iter([[b"A"]])

    monkeypatch.setattr(sys.modules["jaxblt.answers.continuations"], "generate", generate)
    monkeypatch.setattr(type(dna), "decoder", None)
    for as_trained, expected in ((True, b"GATTACA"), (False, b"gattaca")):
        assert dna.generate([b"gattaca"], max_new_bytes=1, as_trained=as_trained) == [b"A"]
        assert asked[-1] == [expected]
