"""Datasets: from bytes to batches and back, whatever the packing and the number of processes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxblt.data import (
    BOS,
    EOS,
    OFFSET,
    PAD,
    BytesSource,
    DataConfig,
    decode,
    make_dataset,
    reverse_complement,
)
from tests.data.naive import documents_of, stream

PACKINGS = ("windows", "first_fit", "sequential", "buckets")
NUMBERED = BytesSource([bytes(range(200)), bytes(range(100, 256))], ["a", "b"])  # a byte tells its position
documents = st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=6)


def config(**options):
    packing = options.get("packing", "windows")
    extra = {"buckets": (8,)} if packing == "buckets" else {}
    return DataConfig(**{"seq_len": 16, "batch_size": 4, **extra, **options})


def batches(dataset, steps=None):
    return [dataset.batch(step) for step in range(dataset.num_batches if steps is None else steps)]


def equal(a, b):
    fields = ("inputs", "targets", "segment_ids", "positions", "loss_mask")
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in fields)


@given(documents, st.sampled_from(PACKINGS), st.booleans(), st.integers(0, 15))
def test_evaluation_scores_every_target_once(docs, packing, eos, context):
    context = context if packing == "windows" else 0
    made = config(packing=packing, eos=eos, context=context)
    dataset = make_dataset(made, split="all", mode="eval", source=BytesSource(docs))
    scored = np.concatenate([np.asarray(b.targets)[np.asarray(b.loss_mask) == 1] for b in batches(dataset)])
    expected = np.concatenate([stream(d, eos=eos)[1:] for d in docs])
    if packing in ("windows", "sequential"):
        assert scored.tolist() == expected.tolist()
    else:
        assert sorted(scored) == sorted(expected)


@given(documents, st.sampled_from(PACKINGS), st.sampled_from([1, 2, 4, 8]))
def test_rows_are_documents_shifted_by_one(docs, packing, alignment):
    dataset = make_dataset(
        config(packing=packing, alignment=alignment), split="all", mode="eval", source=BytesSource(docs)
    )
    streams = [stream(d, eos=True) for d in docs]
    found = []
    for batch in batches(dataset):
        segments, positions = np.asarray(batch.segment_ids), np.asarray(batch.positions)
        for row, place in zip(segments, positions, strict=True):
            changes = np.flatnonzero(np.diff(row, prepend=0))
            starts = [i for i in changes if row[i] > 0]
            assert all(i % alignment == 0 and place[i] == 0 for i in starts)
            assert [row[i] for i in starts] == list(range(1, len(starts) + 1))
            for s in range(1, len(starts) + 1):
                assert place[row == s].tolist() == list(range((row == s).sum()))
        assert (np.asarray(batch.inputs)[segments == 0] == PAD).all()
        assert (np.asarray(batch.targets)[segments == 0] == PAD).all()
        assert np.array_equal(np.asarray(batch.loss_mask), (segments > 0).astype(np.int32))
        found += documents_of(batch)
    pairs = sorted(pair for s in streams for pair in itertools.pairwise(s))
    assert sorted(p for d in found for p in d) == pairs
    assert all(x[1] == y[0] for d in found for x, y in itertools.pairwise(d))
    assert sum(d[0][0] == BOS for d in found) == len(docs)
    assert sum(d[-1][1] == EOS for d in found) == len(docs)


@pytest.mark.parametrize("packing", PACKINGS)
def test_ids_are_int32_and_full_windows_are_one_document(packing):
    batch = make_dataset(config(packing=packing), source=NUMBERED).batch(0)
    for field in ("inputs", "targets", "segment_ids", "positions", "loss_mask"):
        assert getattr(batch, field).dtype == np.int32
        assert getattr(batch, field).shape[0] == 4
    assert batch.entropies is None
    if packing == "windows":
        full = make_dataset(config(partial="drop"), source=NUMBERED).batch(0)
        assert (np.asarray(full.segment_ids) == 1).all()
        assert (np.asarray(full.loss_mask) == 1).all()


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(
    ("split", "parts"), [("train", [(0, 160), (0, 125)]), ("test", [(180, 200), (140, 156)])]
)
def test_no_row_reads_a_byte_of_another_split(packing, split, parts):
    dataset = make_dataset(config(packing=packing, stride=None), split=split, mode="eval", source=NUMBERED)
    (a, b), (c, d) = parts
    allowed = [set(range(a, b)), set(range(100 + c, 100 + d))]
    ended = 0
    for batch in batches(dataset):
        for document in documents_of(batch):
            bytes_read = {i - OFFSET for pair in document for i in pair if i >= OFFSET}
            assert any(bytes_read <= part for part in allowed)
            ended += document[-1][1] == EOS
    assert ended == (2 if split == "test" else 0)  # only the test part reaches the documents' ends


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batches_do_not_depend_on_the_process_count(packing, mode):
    made = config(packing=packing, reverse_complement=True, eos=False)
    single = make_dataset(made, mode=mode, source=NUMBERED)
    for count in (2, 4):
        shares = [
            make_dataset(made, mode=mode, source=NUMBERED, process_index=i, process_count=count)
            for i in range(count)
        ]
        for step in range(single.num_batches or 12):
            expected, parts = single.batch(step), [share.batch(step) for share in shares]
            for field in ("inputs", "targets", "segment_ids", "positions", "loss_mask"):
                joined = np.concatenate([getattr(part, field) for part in parts])
                assert np.array_equal(joined, getattr(expected, field))


def test_chosen_slots_are_rows_of_the_batch():
    dataset = make_dataset(config(), source=NUMBERED)
    assert np.array_equal(dataset.batch(5, slots=[3, 0]).inputs, np.asarray(dataset.batch(5).inputs)[[3, 0]])
    with pytest.raises(IndexError, match=r"slot 4 lies outside 0\.\.3"):
        dataset.batch(0, slots=[4])
    with pytest.raises(IndexError, match="step must be at least 0, got -1"):
        dataset.batch(-1)


def test_an_epoch_reads_every_row_once_and_seeds_differ():
    dataset = make_dataset(config(batch_size=1, partial="drop", eos=False), source=NUMBERED)
    rows = dataset.num_rows

    def epoch(data, number):
        return [decode(np.asarray(data.batch(number * rows + i).targets)[0]) for i in range(rows)]

    first, second = epoch(dataset, 0), epoch(dataset, 1)
    other = epoch(make_dataset(config(batch_size=1, partial="drop", eos=False, seed=1), source=NUMBERED), 0)
    assert len({tuple(sorted(x)) for x in (first, second, other)}) == 1
    assert len({tuple(x) for x in (first, second, other)}) == 3
    assert len(set(first)) == rows


def test_overlapping_windows():
    dataset = make_dataset(
        config(stride=5, split="position"), split="all", source=BytesSource([bytes(range(100))])
    )
    starts = {int(np.asarray(dataset.batch(s).inputs)[i, 0]) for s in range(8) for i in range(4)}
    assert starts == {BOS, *(OFFSET + 5 * k - 1 for k in range(1, 18))}


def test_buckets_give_rows_of_their_length():
    docs = [b"abc"] * 5 + [b"x" * 12] * 3 + [b"y" * 40]
    dataset = make_dataset(config(packing="buckets"), split="all", source=BytesSource(docs))
    lengths = {np.asarray(dataset.batch(step).inputs).shape[1] for step in range(20)}
    assert lengths == {8, 16}
    assert dataset.num_rows == 5 + 3 + 3
    assert dataset.num_bytes == sum(map(len, docs))


DNA = BytesSource([b"".join([b"ACCGTTNNacgtRYGATTACA"] * 9), b"GGGATCCCAAT" * 12])


@pytest.mark.parametrize("packing", PACKINGS)
def test_strands_are_flipped_half_of_the_time_and_read_the_same_bases(packing):
    made = config(packing=packing, eos=False)
    plain = make_dataset(made, source=DNA)
    flipped = make_dataset(config(packing=packing, eos=False, reverse_complement=True), source=DNA)
    kept = turned = 0
    for step in range(60):
        for one, two in zip(documents_of(plain.batch(step)), documents_of(flipped.batch(step)), strict=True):
            bases, other = (decode(np.array([y for _, y in d])) for d in (one, two))
            assert other in (bases, reverse_complement(bases))
            if bases != reverse_complement(bases):
                kept, turned = kept + (other == bases), turned + (other != bases)
    assert abs(turned - kept) < 4 * np.sqrt(turned + kept)
    assert min(turned, kept) > 50


def test_strands_depend_on_seed_and_step_and_evaluation_is_not_flipped():
    made = config(eos=False, reverse_complement=True, batch_size=2, seq_len=64)
    plain = make_dataset(config(eos=False, batch_size=2, seq_len=64), split="test", mode="eval", source=DNA)
    assert all(
        equal(a, b)
        for a, b in zip(
            batches(plain), batches(make_dataset(made, split="test", mode="eval", source=DNA)), strict=True
        )
    )
    dataset = make_dataset(made, source=DNA)
    assert equal(dataset.batch(7), make_dataset(made, source=DNA).batch(7))
    flips = {tuple(dataset._flips(step, slot, 0) for slot in range(16)) for step in range(16)}
    assert len(flips) == 16


def test_a_flipped_window_starts_with_its_neighbour_on_the_other_strand():
    source = BytesSource([b"ACGTTGCAACGGTTAA" * 2])
    dataset = make_dataset(config(eos=False, reverse_complement=True, seq_len=8), split="all", source=source)
    strands = [source.documents[0], reverse_complement(source.documents[0])]
    edges = {tuple(stream(s, eos=False)[i : i + 9]) for s in strands for i in range(0, 32, 8)}
    for step in range(10):
        batch = dataset.batch(step)
        for inputs, targets in zip(np.asarray(batch.inputs), np.asarray(batch.targets), strict=True):
            assert (*inputs.tolist(), int(targets[-1])) in edges


def test_only_chosen_characters_are_scored():
    dataset = make_dataset(config(eos=True, scored="ACGT"), split="all", mode="eval", source=DNA)
    scored = b"".join(decode(np.asarray(b.targets)[np.asarray(b.loss_mask) == 1]) for b in batches(dataset))
    assert scored == b"".join(bytes(x for x in d if x in b"ACGT") for d in DNA.documents)


def test_the_embedded_genome_by_position():
    made = DataConfig(sample="lambda", seq_len=1024, batch_size=2, reverse_complement=True)
    parts = {name: make_dataset(made, split=name, mode="eval") for name in ("train", "validation", "test")}
    genome = b"".join(
        decode(np.asarray(b.targets)[np.asarray(b.loss_mask) == 1])
        for d in parts.values()
        for b in batches(d)
    )
    assert len(genome) == 48_502
    assert [d.num_bytes for d in parts.values()] == [38_802, 4_850, 4_850]
    assert not any((np.asarray(b.targets) == EOS).any() for b in batches(parts["test"]))
    from jaxblt.data import load_sample

    assert genome == load_sample("lambda")
