"""Precomputed entropies: they come back where they belong, and only for the bytes they were computed from."""

import json

import numpy as np
import pytest

from jaxblt.data import BytesSource, DataConfig, make_dataset, read_entropies, source_hash, write_entropies
from jaxblt.seals import HASH, MARK, UnsealedWarning
from tests.flipped import flips

SOURCE = BytesSource([b"hello", b"", b"bytes of a document"])
VALUES = [np.arange(n + 1, dtype=np.float32) + 100 * i for i, n in enumerate(SOURCE.lengths)]


@pytest.fixture
def path(tmp_path):
    write_entropies(tmp_path / "new" / "e.npy", SOURCE, iter(VALUES), model="abc", context=64)
    return tmp_path / "new" / "e.npy"


def test_values_come_back(path):
    entropies = read_entropies(path, SOURCE)
    assert entropies.model == "abc"
    assert entropies.context == 64
    for i, values in enumerate(VALUES):
        assert entropies.read(i, 0, len(values)).tolist() == values.tolist()
    assert entropies.read(2, 3, 7).tolist() == [203, 204, 205, 206]
    assert sorted(p.name for p in path.parent.iterdir()) == ["e.npy", "e.npy.json"]


def test_the_hash_sees_bytes_and_edges_not_names():
    same = BytesSource(SOURCE.documents, ["x", "y", "z"])
    assert source_hash(same) == source_hash(SOURCE)
    for other in ([b"hello", b"b", b"ytes of a document"], [b"hallo", b"", b"bytes of a document"]):
        assert source_hash(BytesSource(other)) != source_hash(SOURCE)


def test_entropies_of_other_data_are_refused(path):
    with pytest.raises(ValueError, match=r"belongs to other data .*compute the entropies again"):
        read_entropies(path, BytesSource([b"hellO", b"", b"bytes of a document"]))
    with pytest.raises(FileNotFoundError, match=r"no precomputed entropies at .*f.npy"):
        read_entropies(path.with_name("f.npy"), SOURCE)


def test_entropies_of_another_model_or_context_are_refused(path):
    entropies = read_entropies(path, SOURCE)
    entropies.check("abc", 64)
    with pytest.raises(
        ValueError, match=r"by another entropy model \(abc\) than that of entropy_run \(xyz\)"
    ):
        entropies.check("xyz", 64)
    with pytest.raises(
        ValueError, match="in a context of 64 bytes, and the patcher has entropy_context = None"
    ):
        entropies.check("abc", None)


def without(path, *names):
    """Take entries out of the note."""
    note = path.with_name(path.name + ".json")
    content = json.loads(note.read_text())
    note.write_text(json.dumps({name: value for name, value in content.items() if name not in names}))


def test_a_note_of_an_older_version_names_no_model(path):
    without(path, "context", HASH, MARK)
    with pytest.warns(UnsealedWarning, match=r"e.npy is of an earlier version and has no hash"):
        entropies = read_entropies(path, SOURCE)
    entropies.check("xyz", None)
    assert entropies.context is None


def test_a_changed_bit_is_an_error(path):
    for file in (path, path.with_name(path.name + ".json")):
        for bit in flips(file):
            with pytest.raises(ValueError) as caught:
                read_entropies(path, SOURCE)
            assert "\n" not in str(caught.value), bit


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.full(27, np.nan, np.float32), r"entropies holds nan at \[0\], expected finite numbers"),
        (
            np.ones(24, np.float32),
            r"float32 of shape \(24,\), expected float32 of shape \(27,\), one for each byte",
        ),
        (np.ones((27, 1), np.float32), r"float32 of shape \(27, 1\)"),
        (np.ones(27, np.int8), r"int8 of shape \(27,\)"),
        (np.ones(27, ">f4"), r">f4 of shape \(27,\)"),
    ],
)
@pytest.mark.filterwarnings("ignore::jaxblt.seals.UnsealedWarning")
def test_files_that_hold_no_entropies_are_refused(path, values, words):
    without(path, HASH, MARK)
    np.save(path, values)
    with pytest.raises(ValueError, match=words):
        read_entropies(path, SOURCE)


def test_a_damaged_note_says_so(path):
    without(path, "model")
    with pytest.raises(ValueError, match=r"e.npy.json lacks model: write the entropies again"):
        read_entropies(path, SOURCE)
    path.with_name(path.name + ".json").write_text("[]")
    with pytest.raises(ValueError, match=r"e.npy.json lacks source_sha256, model, documents, values"):
        read_entropies(path, SOURCE)


def test_incomplete_or_wrong_values_leave_no_file(tmp_path):
    for values, message in [
        (VALUES[:2], "entropies of 2 documents were given, the source has 3"),
        ([*VALUES, VALUES[0]], "more than the source's 3 documents"),
        ([VALUES[1], *VALUES[1:]], r"document 0 needs 6 entropies .* got shape \(1,\)"),
        ([VALUES[0] * np.nan, *VALUES[1:]], "document 0 has an entropy that is not finite, at 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_entropies(tmp_path / "e.npy", SOURCE, iter(values))
        assert not (tmp_path / "e.npy").exists()
    with pytest.raises(ValueError, match=r"are written to a .npy file"):
        write_entropies(tmp_path / "e.bin", SOURCE, iter(VALUES))


@pytest.mark.parametrize("packing", ["windows", "first_fit"])
@pytest.mark.parametrize("split", ["all", "train", "test"])
def test_batches_carry_the_entropy_of_each_input(tmp_path, packing, split):
    """The value stands at the input whose next id it is about: here it names that place in the document."""
    source = BytesSource([bytes(range(60)), bytes(range(60, 100))])
    values = [np.arange(61, dtype=np.float32), np.arange(60, 101, dtype=np.float32)]
    write_entropies(tmp_path / "e.npy", source, iter(values))
    config = DataConfig(
        seq_len=16, batch_size=2, packing=packing, entropies=str(tmp_path / "e.npy"), alignment=4
    )
    data = make_dataset(config, split=split, mode="eval", source=source)
    for step in range(data.num_batches or 0):
        batch = data.batch(step)
        targets, entropies = np.asarray(batch.targets), np.asarray(batch.entropies)
        scored = (np.asarray(batch.loss_mask) == 1) & (targets >= 4)
        assert entropies.dtype == np.float32
        assert scored.any()
        assert (entropies[scored] == targets[scored] - 4).all()  # byte v is about to come at place v
        assert (entropies[np.asarray(batch.segment_ids) == 0] == 0).all()
