"""Mixtures: shares by weight, each source epoch by epoch, every row of one source, evaluation source by source."""

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import jaxblt
from jaxblt.data import DataConfig, SourceConfig, make_dataset, open_source
from jaxblt.data.schedule import Mixed
from jaxblt.data.vocab import OFFSET
from jaxblt.training.evaluate import source_steps
from jaxblt.training.log.runlog import read_metrics
from jaxblt.training.loop import fit
from jaxblt.training.stored.serialize import from_json, to_json
from tests.training.tiny import tiny_recipe

WEIGHTS = (3.0, 1.0, 0.5)


def source_of(rows, number):
    return sum(number >= edge for edge in np.cumsum(rows)[:-1])


@pytest.mark.parametrize(
    ("rows", "weights", "batch_size", "seed"),
    [((40, 7), (1.0, 2.5), 3, 0), ((1, 9, 30, 4), (0.3, 0.1, 5.0, 1.0), 7, 1), ((12,), (0.01,), 2, 2)],
)
def test_shares_are_within_the_binomial_bound_and_rows_come_epoch_by_epoch(rows, weights, batch_size, seed):
    schedule = Mixed(rows, weights, batch_size, seed)
    count = 3 * 256
    drawn = [schedule.row(schedule.place(g // batch_size), g % batch_size) for g in range(count)]
    counts = Counter(source_of(rows, number) for number in drawn)
    for source, weight in enumerate(weights):
        share, n = weight / sum(weights), len(drawn)
        # 6 standard deviations of independent draws, and one sample for rounding
        assert abs(counts[source] - n * share) <= 6 * (n * share * (1 - share)) ** 0.5 + 1
    if len(drawn) == count:
        for source, (low, high) in enumerate(pairwise(np.cumsum([0, *rows]).tolist())):
            visits = Counter(number for number in drawn if low <= number < high)
            assert (
                max(visits.values(), default=0) - min((visits[n] for n in range(low, high)), default=0) <= 1
            )
            assert source_of(rows, low) == source


def test_the_share_of_each_block_is_exact_and_its_order_is_not():
    schedule = Mixed((50, 50, 50), WEIGHTS, 1, 0)
    order = [source_of((50, 50, 50), schedule.row(schedule.place(g), 0)) for g in range(2 * 256)]
    assert [order.count(source) for source in range(3)] == [341, 114, 57]
    assert order[:256] != order[256:512]
    assert len(set(order[:20])) > 1


def test_a_rare_source_has_its_share():
    """In blocks of 256 samples the counts of the first two sources would cross."""
    rows = (50, 50, 50)
    schedule = Mixed(rows, (1.5, 0.1, 254.4), 1, 0)
    drawn = Counter(source_of(rows, schedule.row(schedule.place(g), 0)) for g in range(2561))
    assert abs(drawn[0] - 15) <= 1
    assert abs(drawn[1] - 1) <= 1
    assert drawn.total() == 2561


def test_blocks_sources_and_epochs_have_orders_of_their_own():
    """Each of two sources of 256 rows gives half of a block of 256 samples, so an epoch takes two blocks."""
    schedule = Mixed((256, 256), (1.0, 1.0), 1, 0)
    blocks = [[schedule.row(schedule.place(256 * b + i), 0) for i in range(256)] for b in range(4)]
    assert len({tuple(row // 256 for row in block) for block in blocks}) == 4
    halves = {
        (source, b): {row % 256 for row in blocks[b] if row // 256 == source}
        for source in (0, 1)
        for b in (0, 2)
    }
    assert all(len(half) == 128 for half in halves.values())
    assert len({*map(frozenset, halves.values()), frozenset(range(128))}) == 5


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Sources told apart by their letters: a text of two files, one of "xy", and a genome."""
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)
    for name, letters, size in (("a1", b"ab", 700), ("a2", b"ab", 500), ("x", b"xy", 400)):
        (folder / f"{name}.txt").write_bytes(bytes(rng.choice(list(letters), size).tolist()))
    (folder / "g.fa").write_text(">chr\n" + "".join(rng.choice(list("ACGT"), 900)) + "\n")
    return DataConfig(
        seq_len=32,
        batch_size=8,
        sources=(
            SourceConfig(name="texts", weight=3, paths=(f"{folder}/a*.txt",)),
            SourceConfig(name="letters", paths=(f"{folder}/x.txt",)),
            SourceConfig(name="genome", weight=2, kind="fasta", paths=(f"{folder}/g.fa",)),
        ),
    )


LETTERS = {"texts": set(b"ab"), "letters": set(b"xy"), "genome": set(b"ACGT")}


def sources_in(row):
    ids = np.asarray(row)
    letters = set((ids[ids >= OFFSET] - OFFSET).tolist())
    return [name for name, own in LETTERS.items() if letters & own]


@pytest.mark.parametrize("packing", ["windows", "first_fit"])
def test_a_row_is_of_one_source_and_follows_from_seed_step_and_slot(config, packing):
    config = dataclasses.replace(config, packing=packing)
    data, other = (make_dataset(config) for _ in range(2))
    halves = [make_dataset(config, process_index=i, process_count=2) for i in range(2)]
    for step in (0, 7, 10**9):
        batch = data.batch(step)
        assert all(len(sources_in(row)) == 1 for row in batch.inputs)
        np.testing.assert_array_equal(batch.inputs, other.batch(step).inputs)
        np.testing.assert_array_equal(batch.inputs, np.concatenate([h.batch(step).inputs for h in halves]))
    found = Counter(sources_in(row)[0] for step in range(32) for row in data.batch(step).inputs)
    assert {name: round(count / 42.7) for name, count in found.items()} == {
        "texts": 3,
        "letters": 1,
        "genome": 2,
    }


def test_rows_of_a_source_are_those_that_it_has_by_itself(config):
    mixed = make_dataset(config)
    rows = {tuple(row) for step in range(90) for row in np.asarray(mixed.batch(step).targets).tolist()}
    alone = set()
    for source in config.sources:
        own = make_dataset(config.of(source))
        alone |= {tuple(row) for step in range(8) for row in np.asarray(own.batch(step).targets).tolist()}
    assert rows == alone


def test_sources_grow_with_a_length_schedule(config):
    growing = make_dataset(dataclasses.replace(config, length_schedule=((4, 16),)))
    assert [growing.batch(step).inputs.shape for step in (3, 4)] == [(16, 16), (8, 32)]
    assert all(len(sources_in(row)) == 1 for row in growing.batch(4).inputs)


def test_evaluation_reads_source_after_source_and_shares_a_limit(config):
    data = make_dataset(config, split="all", mode="eval")
    assert data.source_names == ("texts", "letters", "genome")
    whole = source_steps(data, None)
    assert [step for steps in whole.values() for step in steps] == list(range(data.num_batches))
    for name, steps in whole.items():
        for step in steps:
            named = [sources_in(row) for row in data.batch(step).targets]
            assert {one[0] for one in named if one} == {name}
    shared = source_steps(data, 4)
    assert [len(steps) for steps in shared.values()] == [2, 1, 1]
    assert all(set(steps) <= set(whole[name]) for name, steps in shared.items())
    assert [len(steps) for steps in source_steps(data, 1).values()] == [1, 1, 1]


@pytest.mark.slow(days=28, group="costly", turn="data/test_mixture")
def test_a_run_scores_each_source_as_it_would_be_scored_alone(config, tmp_path):
    recipe = tiny_recipe(steps=6, eval_every=6)
    recipe = dataclasses.replace(recipe, data=config)
    fitted = fit(recipe, tmp_path)
    assert from_json(to_json(recipe)) == recipe
    run = jaxblt.load(tmp_path)
    found = run.evaluate("validation")
    sums = 0.0
    for source in config.sources:
        alone = run.evaluate("validation", data=config.of(source))
        assert found[f"{source.name}/bits_per_byte"] == pytest.approx(alone["bits_per_byte"], rel=1e-6)
        assert found[f"{source.name}/bytes"] == alone["bytes"]
        sums += alone["loss"] * alone["bytes"]
    assert found["loss"] == pytest.approx(sums / found["bytes"], rel=1e-6)
    assert fitted.validation["genome/bits_per_byte"] == pytest.approx(found["genome/bits_per_byte"], rel=1e-6)
    assert "validation/genome/bits_per_byte" in list(read_metrics(tmp_path / "metrics.jsonl"))[-1]
    given = run.evaluate("validation", source=open_source(config.of(config.sources[0])))
    assert given["bytes"] == found["texts/bytes"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample": "book"}, "DataConfig.sources name the documents, got .*sample='book'"),
        ({"packing": "buckets"}, "sources need rows of one length"),
        ({"reverse_complement": True}, "reverse_complement needs eos=False"),
        ({"seq_len": 800}, "source 'texts': seq_len = 800 is longer than every document"),
    ],
)
def test_what_does_not_go_with_sources_is_refused(config, changes, said):
    with pytest.raises(ValueError, match=said):
        make_dataset(dataclasses.replace(config, **changes))
    with pytest.raises(ValueError, match="names of their own, got texts, texts"):
        dataclasses.replace(config, sources=(config.sources[0],) * 2)


def test_sources_that_share_a_file_split_it_alike(tmp_path):
    """Else one would train on documents that another holds out."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(name.encode() * 100)
    both, first = (str(tmp_path / "*.txt"),), (str(tmp_path / "a.txt"),)

    def opened(*paths, split, names=("*b.txt", "*b.txt"), **options):
        held = [{} if split != "names" else {"validation_names": (name,)} for name in names]
        own = zip("xy", paths, held, strict=True)
        sources = tuple(SourceConfig(name=name, paths=path, **held) for name, path, held in own)
        return make_dataset(DataConfig(sources=sources, split=split, seq_len=8, batch_size=2, **options))

    said = r"a.txt' is of source 'x' and of 'y', whose documents are split in different ways"
    assert opened(both, first, split="position").num_bytes == 240
    assert opened(both, both, split="names").num_bytes == 200
    (tmp_path / "c.md").write_bytes(b"c" * 100)
    assert opened((*both, str(tmp_path / "c.md")), both, split="names").num_bytes == 300
    with pytest.raises(ValueError, match=said):
        opened(both, both, split="names", names=("*a.txt", "*b.txt"))
    with pytest.raises(ValueError, match=said):
        opened(both, first, split="documents")
    with pytest.raises(
        ValueError, match=r"data.validation_names = \('\*b.txt',\) is read with validation_names of ea"
    ):
        opened(both, both, split="names", validation_names=("*b.txt",))
