"""An index as a file: read back bit by bit, and refused where it is not what a router searches."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxblt.adapters import Neighbours
from jaxblt.adapters.retrieval import load_index, make_index, save_index
from jaxblt.adapters.retrieval.index import owner_bytes, owner_keys
from jaxblt.seals import UnsealedWarning
from tests.flipped import flips

READ = Neighbours("here", capacity=16, count=3)
OWNERS = np.asarray([5, 5, 2**31 - 1, 256, 256, 256, 70000, 1])


@pytest.fixture(scope="module")
def index():
    vectors = np.random.default_rng(0).standard_normal((8, 5)) + 3
    return make_index(vectors, OWNERS, base="b" * 64, stack="stack", chunk=4, neighbours=3)


def test_an_index_is_centred_and_comes_back(index, tmp_path):
    np.testing.assert_allclose(np.linalg.norm(index.vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(index.center, 3, atol=1.5)
    save_index(index, tmp_path / "a")
    found = load_index(tmp_path / "a")
    for name in ("vectors", "owners", "center", "norms"):
        np.testing.assert_array_equal(getattr(found, name), getattr(index, name))
    assert (found.base, found.stack, found.chunk, found.neighbours) == ("b" * 64, "stack", 4, 3)
    found.check(READ, chunk=4, base="b" * 64, stack="stack", dim=5)
    with pytest.raises(FileExistsError, match="nothing is overwritten"):
        save_index(index, tmp_path / "a")


def test_parameters_have_empty_places_and_whole_keys(index):
    params = index.params(16)
    assert params["vectors"].shape == (16, 5)
    assert not params["vectors"][8:].any()
    assert params["owners"].max() <= 255
    np.testing.assert_array_equal(owner_keys(owner_bytes(OWNERS)), OWNERS)
    with pytest.raises(ValueError, match=r"8 chunks does not fit Neighbours.capacity = 7: raise it to 8"):
        index.params(7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base": "c" * 64}, "base of content hash b{64}, expected c{64}: make an index of this base"),
        ({"stack": "latent"}, "stack stack, expected latent: make the index with stack='latent'"),
        ({"dim": 6}, "width 5, expected 6"),
        ({"chunk": 8}, r"chunk 4, expected 8: set RouterConfig.chunk = 4"),
        (
            {"read": replace(READ, count=2)},
            r"neighbours 3, expected 2: set Neighbours.count = 3",
        ),
    ],
)
def test_an_index_of_something_else_is_refused(index, changes, words):
    told = {"read": READ, "chunk": 4, "base": "b" * 64, "stack": "stack", "dim": 5} | changes
    with pytest.raises(ValueError, match=words) as caught:
        index.check(told.pop("read"), **told)
    assert "\n" not in str(caught.value)


def spoil(folder, index, **changes):
    """An index whose file holds other arrays or says something else."""
    path = save_index(index, folder)
    arrays = load_file(path)
    texts = {
        "format": "jaxblt index",
        "version": "1",
        "base": "b",
        "stack": "s",
        "chunk": "4",
        "neighbours": "3",
    }
    texts |= {name: value for name, value in changes.items() if name in texts}
    arrays |= {name: value for name, value in changes.items() if name not in texts}
    save_file({name: x for name, x in arrays.items() if x is not None}, path, texts)
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "9"}, "format 'jaxblt index' '9', expected 'jaxblt index' '1'"),
        ({"chunk": "-4"}, "has chunk = '-4', expected a whole number above 0: make the index anew"),
        (
            {"vectors": np.zeros((0, 5), np.float32), "owners": np.zeros(0, np.int32)},
            "with a vector or more: make the index anew",
        ),
        ({"owners": None}, r"holds \['center', 'norms', 'vectors'\] and says"),
        ({"center": np.zeros(4, np.float32)}, r"'center': \(\(4,\), dtype\('float32'\)\)"),
    ],
)
def test_a_file_that_is_no_index_is_refused(index, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        load_index(spoil(tmp_path, index, **changes))


def test_a_changed_bit_is_an_error(index, tmp_path):
    for bit in flips(save_index(index, tmp_path)):
        with pytest.raises(ValueError) as caught:
            load_index(tmp_path)
        assert "\n" not in str(caught.value), bit
    load_index(tmp_path)


def test_an_index_of_an_earlier_version_is_read_with_a_word(index, tmp_path):
    with pytest.warns(UnsealedWarning, match="has no hash"):
        load_index(spoil(tmp_path / "a", index))
    broken = {"center": np.full(5, np.nan, np.float32)}
    with pytest.warns(UnsealedWarning), pytest.raises(ValueError, match=r"center holds nan at \[0\]"):
        load_index(spoil(tmp_path / "b", index, **broken))


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no index: index.safetensors is missing; `jaxblt index RUN"
    ):
        load_index(tmp_path)
    (tmp_path / "index.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        load_index(tmp_path)


def test_what_makes_no_index():
    none = {"base": "", "stack": "s", "chunk": 4, "neighbours": 3}
    with pytest.raises(ValueError, match="needs a chunk, got none: give documents longer than chunk = 4"):
        make_index(np.zeros((0, 5)), np.zeros(0), **none)
    with pytest.raises(ValueError, match="an index of 2 chunks has no neighbours = 3: use fewer, or index"):
        make_index(np.ones((2, 5)), np.ones(2), **none)
    with pytest.raises(ValueError, match="must be finite"):
        make_index(np.full((3, 5), np.nan), np.ones(3), **none)
