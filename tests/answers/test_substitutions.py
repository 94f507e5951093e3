"""All single substitutions against each mutant read alone; attributions against scaled embeddings, and their sums."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblt.answers import continued
from jaxblt.answers.mutagenesis import _effects
from jaxblt.cli import answers as commands
from jaxblt.data import LabelledDataConfig
from jaxblt.data.vocab import OFFSET
from jaxblt.models import LabelHeadConfig, LabellerConfig, WordsConfig
from jaxblt.run import Run
from jaxblt.training.objectives.objectives import Classify, Regress
from jaxblt.training.recipe import Recipe, TrainConfig
from jaxblt.training.start.setup import make_task
from tests.answers.runs import BYTES, drawn, make_run

RECORDS = [b"GATTACA", b"acgNT"]


def labelled_run(head, objective, **data):
    recipe = Recipe(
        name="tiny",
        model=LabellerConfig(BYTES, head),
        data=LabelledDataConfig(paths=("none.csv",), seq_len=64, batch_size=8, soft_mask="upper", **data),
        objective=objective,
        train=TrainConfig(dtype="float32"),
    )
    return Run(recipe, 0, make_task(recipe), drawn(recipe.model.build()), {})


@pytest.fixture(scope="module")
def labeller():
    head = LabelHeadConfig(outputs=3, words=WordsConfig(longest=2))
    return labelled_run(head, Classify(), classes=("a", "b", "c"))


@pytest.fixture(scope="module")
def reader():
    """A run that predicts bases."""
    return make_run(BYTES, data={"kind": "fasta", "soft_mask": "upper", "scored": "ACGT"})


def mutants(record, alphabet):
    return [
        (t, a, record[:t] + letter.encode() + record[t + 1 :])
        for t in range(len(record))
        for a, letter in enumerate(alphabet)
    ]


def test_likelihoods_of_all_substitutions_are_those_of_mutants_alone(reader):
    found = reader.mutagenesis(RECORDS, batch_size=8)
    for record, effects in zip(found.sequences, found.effects, strict=True):
        assert record.isupper()
        own = reader.score([record]).log_likelihood[0]
        each = mutants(record, "ACGT")
        alone = reader.score([mutant for *_, mutant in each]).log_likelihood
        for (t, a, _), nats in zip(each, alone, strict=True):
            if record[t : t + 1] == b"N":
                assert np.isnan(effects[t, a])
            else:
                np.testing.assert_allclose(effects[t, a], nats - own, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="alphabet 'ACGX' has 'X', and the run learned only scored='ACGT'"):
        reader.mutagenesis(RECORDS, alphabet="ACGX")
    with pytest.raises(ValueError, match="label = 'a' is of runs on classes, and this one predicts bytes"):
        reader.mutagenesis(RECORDS, label="a")


def test_a_record_is_compared_with_mutants_of_its_own_call():
    """Sums of another call begin at another byte, and are rounded otherwise."""
    calls = []

    def answer(versions):
        calls.append(len(versions))
        return np.array([version.count(b"G") + 100.0 * len(calls) for version in versions])

    found = _effects(b"GAT" * 40, "ACGT", answer)
    np.testing.assert_array_equal(found, [[-1, -1, 0, -1], [0, 0, 1, 0], [0, 0, 1, 0]] * 40)
    assert calls == [256, 106]


@pytest.mark.slow(days=28, group="costly", turn="answers/test_substitutions")
def test_the_bytes_before_a_substitution_are_read_once(monkeypatch):
    """Effects of a record of 300 bases are those of mutants alone, and two thirds of the bytes are read."""
    run = make_run(BYTES, data={"kind": "fasta", "soft_mask": "upper", "scored": "ACGT", "seq_len": 512})
    record = (
        np.random.default_rng(0).choice(list(b"ACGTN"), 300, p=[0.24] * 4 + [0.04]).astype(np.uint8).tobytes()
    )
    sizes, read = [], continued._nats

    def count(task, params, frozen, ids, targets, segment_ids, state):
        sizes.append(int(segment_ids.sum()))
        return read(task, params, frozen, ids, targets, segment_ids, state)

    monkeypatch.setattr(continued, "_nats", count)
    (effects,) = run.mutagenesis([record], batch_size=8).effects
    each = [mutant for mutant in mutants(record, "ACGT") if mutant[0] % 37 == 5 or mutant[0] in (0, 299)]
    alone = run.score([record, *(m for *_, m in each)]).log_likelihood
    for (t, a, _), nats in zip(each, alone[1:], strict=True):
        if record[t : t + 1] == b"N":
            assert np.isnan(effects[t, a])
        else:
            np.testing.assert_allclose(effects[t, a], nats - alone[0], rtol=1e-5, atol=1e-4)
    whole = sum(4 - (b in b"ACGT") for b in record) * len(record)
    # Of four groups of 255 mutants the first reads 300 bases each, and the last 45
    assert 0.6 < sum(sizes) / whole < 0.7


def log_odds(probabilities, c):
    return np.log(probabilities[:, c]) - np.log(np.delete(probabilities, c, 1).sum(1))


def test_log_odds_of_all_substitutions_are_those_of_mutants_alone(labeller, monkeypatch, tmp_path):
    found = labeller.mutagenesis(RECORDS)
    assert found.labels == labeller.classify(RECORDS).predictions
    for record, label, effects in zip(found.sequences, found.labels, found.effects, strict=True):
        c = ("a", "b", "c").index(label)
        each = mutants(record, "ACGT")
        alone = log_odds(
            labeller.classify([record, *(m for *_, m in each)]).probabilities.astype(np.float64), c
        )
        np.testing.assert_allclose(effects.ravel(), alone[1:] - alone[0], rtol=2e-4, atol=2e-4)
    monkeypatch.setattr("jaxblt.run.load", lambda run_dir, *, step=None, weights=None: labeller)
    (tmp_path / "r.fa").write_text(">one\nGATTACA\n")
    said = commands.mutagenesis(Path("run"), tmp_path / "r.fa", out=tmp_path / "m.tsv", label="b")
    assert said == f"1 records, 7 positions x 4 letters, in {tmp_path / 'm.tsv'}"
    header, first, *rest = [line.split("\t") for line in (tmp_path / "m.tsv").read_text().splitlines()]
    assert header == ["name", "label", "position", "reference", "A", "C", "G", "T"]
    assert (first[:4], first[6], len(rest)) == (["one", "b", "1", "G"], "0", 6)
    with pytest.raises(ValueError, match="label = 'd' is none of the run's classes, a, b, c"):
        labeller.mutagenesis(RECORDS, label="d")


@pytest.mark.slow(days=28, group="costly", turn="answers/test_substitutions")
def test_integrated_gradients_add_up_and_gradients_are_slopes_of_scaled_embeddings(labeller):
    found = labeller.attributions(RECORDS, method="integrated", steps=64, label="b")
    sums = [values.sum() for values in found.values]
    np.testing.assert_allclose(sums, found.answers - found.baselines, rtol=2e-3, atol=2e-3)
    assert np.abs(found.answers - found.baselines).min() > 0.02
    wanted = log_odds(labeller.classify(RECORDS).probabilities.astype(np.float64), 1)
    np.testing.assert_allclose(found.answers, wanted, rtol=1e-4, atol=1e-4)
    slopes = labeller.attributions(RECORDS, label="b")
    size, step = labeller.params["embedding"]["bytes"].shape, 1e-2

    def answer(letter, factor):
        scale = np.ones((size[0], 1), np.float32)
        scale[letter + OFFSET] = factor
        params = {
            **labeller.params,
            "embedding": {"bytes": labeller.params["embedding"]["bytes"] * jnp.asarray(scale)},
        }
        p = replace(labeller, params=params).classify(RECORDS).probabilities.astype(np.float64)
        return log_odds(p, 1)

    for letter in b"AT":
        slope = (answer(letter, 1 + step) - answer(letter, 1 - step)) / (2 * step)
        for record, values, one in zip(slopes.sequences, slopes.values, slope, strict=True):
            held = np.frombuffer(record, np.uint8) == letter
            assert values[held].sum() == pytest.approx(one, rel=0.02, abs=2e-3)


@pytest.mark.slow(days=28, group="costly", turn="answers/test_substitutions")
def test_numbers_and_likelihoods_are_explained_too(reader, tmp_path):
    numbers = labelled_run(LabelHeadConfig(target="number", outputs=1), Regress(scale=2.0), target="number")
    effects = numbers.mutagenesis([b"GATT"])
    assert effects.labels is None
    own, other = numbers.classify([b"GATT", b"GCTT"]).predictions
    assert effects.effects[0][1, 1] == pytest.approx(other - own, rel=1e-4)
    found = reader.attributions(RECORDS, method="integrated", steps=512)
    np.testing.assert_allclose(found.answers, reader.score(RECORDS).log_likelihood, rtol=1e-5)
    sums = [values.sum() for values in found.values]
    np.testing.assert_allclose(sums, found.answers - found.baselines, rtol=5e-3, atol=5e-3)
    found.to_tsv(tmp_path / "a.tsv")
    assert (tmp_path / "a.tsv").read_text().splitlines()[1].startswith("0\t1\tG\t")
